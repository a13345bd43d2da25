"""Pages of the prefix cache in files: one a page, written whole or not at all, checked when read.

    KEY.page = one line of JSON {"digest": .., "state": bool}, then the bytes of all leaves in order
    KEY.<process id> = the same, being written

The leaves' shapes and dtypes are the engine's own and are not repeated in a file: a folder belongs
to one identity. digest: blake2b of the bytes. A file that does not fit them is removed and counts
as absent. The file longest unused goes first when there are more than `most` bytes. What killed
runs were writing is removed at the next start; files of other names are left alone. A folder that
cannot be written, a full disk say, costs no request: one warning, and it is only read from then on.
"""

import hashlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

SUFFIX = ".page"
_NAME = re.compile(r"((?:[0-9a-f]{2})+)\.(page|[0-9]+)")


class Files:
    """folder: None keeps nothing. like: (content of a page, state) as shapes and dtypes."""

    def __init__(self, folder: Path | None, most: int, like: Any):
        self.folder, self.most, self.like = folder, most, like
        self._held: dict[bytes, tuple[int, bool]] = {}  # bytes, has a state; longest unused first
        self._used = 0
        self._writes = folder is not None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for path in folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name is None or not path.is_file():
                continue
            if name[2] == SUFFIX[1:]:
                found.append((path.stat(), bytes.fromhex(name[1])))
            elif not _is_running(int(name[2])):
                path.unlink(missing_ok=True)
        with_state = _size(like)
        for stat, key in sorted(found, key=lambda item: item[0].st_mtime_ns):
            self._held[key] = (stat.st_size, stat.st_size > with_state)
        self._used = sum(size for size, _ in self._held.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def has_state(self, key: bytes) -> bool:
        """Whether a page is there together with the rings at its end."""
        return self._held.get(key, (0, False))[1]

    def write(self, key: bytes, content: Any, state: Any) -> None:
        """Keep a page, unless it is there already with as much, or writing has failed before."""
        if not self._writes or (key in self._held and (state is None or self.has_state(key))):
            return
        data = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((content, state)))
        head = {"digest": _digest(data), "state": state is not None}
        path = self._path(key)
        partial = path.with_suffix(f".{os.getpid()}")
        data = json.dumps(head).encode() + b"\n" + data
        try:
            partial.write_bytes(data)
            partial.replace(path)
        except OSError as error:
            self._only_read(error)
            _unlink(partial)
            return
        size = len(data)
        self._used += size - self._held.pop(key, (0, False))[0]
        self._held[key] = (size, state is not None)
        while self._used > self.most:
            self._remove(next(iter(self._held)))

    def read(self, key: bytes) -> tuple[Any, Any] | None:
        """(content, state or None) of a page; None if it is damaged, and then it is removed."""
        if key not in self._held:
            return None
        try:
            head, _, data = self._path(key).read_bytes().partition(b"\n")
            found = json.loads(head)
        except (OSError, ValueError):
            found, data = {}, b""
        like = self.like if found.get("state") else (self.like[0], None)
        if found.get("digest") != _digest(data) or len(data) != _size(like):
            self._remove(key)
            return None
        self._held[key] = self._held.pop(key)
        leaves, at = [], 0
        for leaf in jax.tree.leaves(like):
            size = _size(leaf)
            part = np.frombuffer(data, leaf.dtype, size // leaf.dtype.itemsize, at)
            leaves.append(part.reshape(leaf.shape))
            at += size
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _remove(self, key: bytes) -> None:
        if (error := _unlink(self._path(key))) is not None:
            self._only_read(error)
        self._used -= self._held.pop(key, (0, False))[0]

    def _only_read(self, error: OSError) -> None:
        if self._writes:
            self._writes = False
            warnings.warn(
                f"prefix cache: {self.folder}: {error}; no more pages are written there",
                stacklevel=3,
            )

    def _path(self, key: bytes) -> Path:
        assert self.folder is not None
        return self.folder / (key.hex() + SUFFIX)


def _unlink(path: Path) -> OSError | None:
    """Removes a file, if it is there; why it could not be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None


def _is_running(process: int) -> bool:
    """Whether another process of this number is there. (In containers a run often has the number of
    the one before.)"""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _size(like: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
