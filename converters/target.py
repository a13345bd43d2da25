"""An output folder that is absent, visibly unfinished and resumable, or complete: nothing between.

Work happens in `NAME.partial` beside the target; the last step renames it, so `NAME` never exists
half written. Inside the partial folder a journal lists the pieces that are safely on disk: a piece
is journalled only after its file was fsynced, so after a kill or a power cut the next run skips
exactly what the journal names and writes the rest again. The journal's first line is what the work
depends on (source and options); another source is refused, not mixed in.

A lock (flock, released by the kernel when the process dies) keeps a second converter out, and the
free space is compared with what is still to be written before the first byte.
"""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from converters.converted import PARTIAL
from converters.source import CheckpointError

JOURNAL = "journal.jsonl"
LOCK = "lock"
SPARE_BYTES = 16 * 2**20
MANY = 32  # files from which one sync of everything is cheaper than an fsync of each


class Target:
    """The partial folder of `destination`, locked by this process until `finish` or `close`.

    basis: JSON-able; what a resumed run must share with the first one. `done` maps the keys of the
    pieces that earlier runs finished to their records.
    """

    def __init__(self, destination: str | Path, basis: Mapping[str, Any], restart: bool = False):
        self.destination = Path(os.path.abspath(destination))
        self.path = self.destination.with_name(self.destination.name + PARTIAL)
        self._refuse_existing()
        if not self.destination.parent.is_dir():
            raise CheckpointError([f"{self.destination.parent}: no such folder for the output"])
        self.path.mkdir(exist_ok=True)
        self._lock = self._take_lock()
        self._writing = threading.Lock()
        try:
            self._refuse_existing()  # a run that held the lock may have finished meanwhile
            if restart:
                self._clear()
            self.done = self._read_journal(json.loads(json.dumps(basis)))
        except BaseException:
            self.close()
            raise

    def _refuse_existing(self) -> None:
        if self.destination.is_dir() and not any(self.destination.iterdir()):
            if os.path.ismount(self.destination):
                raise CheckpointError(
                    [f"{self.destination}: is a mount point; name a new folder inside it"]
                )
            return
        if self.destination.exists():
            raise CheckpointError(
                [f"{self.destination}: already exists; delete it or name another output folder"]
            )

    def _take_lock(self) -> TextIO:
        lock = (self.path / LOCK).open("a+", encoding="ascii")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(lock.fileno()), os.stat(self.path / LOCK))
        except (BlockingIOError, FileNotFoundError):
            same = False
        if not same:
            lock.close()
            raise CheckpointError(
                [f"{self.path}: another conversion into this folder is running (it holds the lock)"]
            )
        return lock

    def _clear(self) -> None:
        for item in self.path.iterdir():
            if item.is_dir():
                shutil.rmtree(item)
            elif item.name != LOCK:
                item.unlink()

    def _read_journal(self, basis: Any) -> dict[str, Any]:
        file = self.path / JOURNAL
        written = file.read_bytes() if file.exists() else b""
        whole = written.rfind(b"\n") + 1  # a line torn by the interruption: written again
        lines = written[:whole].decode().splitlines()
        if lines:
            found = json.loads(lines[0])
            if found != basis:
                keys = [k for k in {**found, **basis} if found.get(k) != basis.get(k)]
                raise CheckpointError(
                    [
                        f"{self.path}: left by a conversion with another {', '.join(keys)}; "
                        "finish that one, or start anew with --restart"
                    ]
                )
        if whole < len(written):
            os.truncate(file, whole)
        self._journal = file.open("a", encoding="utf-8")
        if not lines:
            self._journal.write(json.dumps(basis) + "\n")
            self._sync_journal()
        records = map(json.loads, lines[1:])
        return {record.pop("piece"): record for record in records}

    def _sync_journal(self) -> None:
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def require_space(self, remaining: int) -> None:
        """Refuse before writing if `remaining` bytes (and a little) do not fit."""
        free = shutil.disk_usage(self.path).free
        if remaining + SPARE_BYTES > free:
            if not self.done:
                shutil.rmtree(self.path)
            raise CheckpointError(
                [
                    f"{self.destination.parent}: {remaining + SPARE_BYTES:,} bytes needed, "
                    f"{free:,} free"
                ]
            )

    def commit(self, pieces: Iterable[tuple[str, Path, Mapping[str, Any]]]) -> None:
        """Make pieces (key, file, record) durable, then journal them; from any thread."""
        pieces = list(pieces)
        if len(pieces) > MANY:
            os.sync()
        else:
            for _, file, _ in pieces:
                sync(file)
        with self._writing:
            for key, _, record in pieces:
                self._journal.write(json.dumps({"piece": key, **record}) + "\n")
            self._sync_journal()

    def finish(self, last: bytes, name: str) -> Path:
        """Write the last file, make everything durable, and give the folder its real name."""
        (self.path / name).write_bytes(last)
        os.sync()  # the names of all files, which fsync of the files alone does not cover
        if self.destination.is_dir():
            self.destination.rmdir()
        self.path.rename(self.destination)
        sync(self.destination.parent)
        for leftover in (JOURNAL, LOCK):
            (self.destination / leftover).unlink()
        self.close()
        return self.destination

    def close(self) -> None:
        """Release the lock; a partial folder into which nothing was written goes."""
        if hasattr(self, "_journal"):
            self._journal.close()
        if self.path.is_dir() and all(item.name == LOCK for item in self.path.iterdir()):
            shutil.rmtree(self.path)
        self._lock.close()


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_nesting(source: Path, destination: Path) -> None:
    """The output may not lie inside the source, nor the source inside the output."""
    source, output = source.resolve(), destination.resolve()
    if output == source or source in output.parents or output in source.parents:
        raise CheckpointError(
            [f"{destination}: the output folder may not overlap the source {source}"]
        )
