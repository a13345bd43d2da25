"""An output folder that is absent, visibly unfinished and resumable, or complete: nothing between.

Work happens in `NAME.partial` beside the target; the last step renames it, so `NAME` never exists
half written. Inside the partial folder a journal lists the files, or beginnings of files, that are
safely on disk: a line is written only after its file was fsynced, and believed only if the file
still has its size, so after a kill or a power cut the next run skips exactly what is there and
writes the rest again. The journal's first line is what the work depends on (source and options);
another source is refused, not mixed in.

A lock (flock, released by the kernel when the process dies) keeps a second converter out, and the
free space is compared with what is still to be written before the first byte.
"""

import fcntl
import json
import os
import shutil
import threading
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from converters.converted import PARTIAL
from converters.source import CheckpointError

JOURNAL = "journal.jsonl"
LOCK = "lock"
SPARE_BYTES = 16 * 2**20
MANY = 32  # files from which one sync of everything is cheaper than an fsync of each
COMMIT_BYTES = 256 * 2**20


class Written(NamedTuple):
    """What was written and can be journalled: the first `nbytes` of a file, which is `whole` or
    will grow; `facts` are kept with it."""

    key: str
    file: Path
    nbytes: int
    whole: bool
    facts: Mapping[str, Any] = types.MappingProxyType({})


class Target:
    """The partial folder of `destination`, locked by this process until `finish` or `close`.

    basis: JSON-able; what a resumed run must share with the first one. `done` maps the keys of the
    pieces that earlier runs finished to their records.
    """

    def __init__(self, destination: str | Path, basis: Mapping[str, Any], restart: bool = False):
        """Raises `CheckpointError`, also where the folder cannot be made or locked."""
        self.destination = Path(os.path.abspath(destination))
        self.path = self.destination.with_name(self.destination.name + PARTIAL)
        try:
            self._open(basis, restart)
        except OSError as error:
            raise CheckpointError([f"{self.path}: {error}"]) from error

    def _open(self, basis: Mapping[str, Any], restart: bool) -> None:
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
            found = self._json(lines[0])
            if found != basis:
                keys = [k for k in {**found, **basis} if found.get(k) != basis.get(k)]
                raise CheckpointError(
                    [
                        f"{self.path}: left by a conversion with other {', '.join(keys)}; "
                        "finish that one, or start anew with --restart"
                    ]
                )
        if whole < len(written):
            os.truncate(file, whole)
        self._journal = file.open("ab", buffering=0)
        if not lines:
            self._append([basis])
        records = [self._json(line) for line in lines[1:]]
        latest = {record.pop("piece"): record for record in records}
        return {key: record for key, record in latest.items() if self._is_there(record)}

    def _json(self, line: str) -> dict[str, Any]:
        try:
            return json.loads(line)
        except ValueError as error:
            raise CheckpointError(
                [f"{self.path / JOURNAL}: damaged ({error}); start anew with --restart"]
            ) from None

    def _is_there(self, record: Mapping[str, Any]) -> bool:
        """Whether a journalled file still has its size (or more, if it was growing)."""
        file = self.path / record["file"]
        size = file.stat().st_size if file.is_file() else -1
        return size == record["bytes"] or (not record["whole"] and size > record["bytes"])

    def _append(self, records: Sequence[Any]) -> None:
        """Whole lines, or none: what a full disk cut short is taken back."""
        data = memoryview("".join(json.dumps(record) + "\n" for record in records).encode())
        start = os.fstat(self._journal.fileno()).st_size
        try:
            while data:
                data = data[self._journal.write(data) :]
            os.fsync(self._journal.fileno())
        except OSError:
            self._journal.truncate(start)
            raise

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

    def commit(self, written: Sequence[Written]) -> None:
        """Make files durable, then journal them; from any thread."""
        if len(written) > MANY:
            os.sync()
        else:
            for file in {item.file for item in written}:
                sync(file)
        records = [
            {
                "piece": item.key,
                "file": str(item.file.relative_to(self.path)),
                "bytes": item.nbytes,
                "whole": item.whole,
                **item.facts,
            }
            for item in written
        ]
        with self._writing:
            self._append(records)

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


class Committer:
    """Commits what workers have written in the background, a batch of some size at a time.

    As a context manager: on the way out all that was written is committed, also when the work was
    interrupted or failed, so that the next run starts from there.
    """

    def __init__(self, target: Target, batch_bytes: int):
        self._target, self._batch_bytes = target, batch_bytes
        self._waiting: list[Written] = []
        self._waiting_bytes = 0
        self._lock = threading.Lock()

    def __enter__(self) -> "Committer":
        self._pool = ThreadPoolExecutor(1, "commit")
        self._last: Future[None] = self._pool.submit(lambda: None)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            self._flush()
            self._last.result()
        except OSError:
            if kind is None:
                raise  # else the first failure is the one to tell, most likely of the same disk
        finally:
            self._pool.shutdown()

    def add(self, written: Written, nbytes: int) -> None:
        """Queue what was written, `nbytes` since the last time; raises what a commit raised."""
        with self._lock:
            self._waiting.append(written)
            self._waiting_bytes += nbytes
            if self._waiting_bytes >= self._batch_bytes:
                self._flush()

    def _flush(self) -> None:
        """One batch at a time: a disk that cannot keep up holds the workers back."""
        self._last.result()
        self._last = self._pool.submit(self._target.commit, self._waiting)
        self._waiting, self._waiting_bytes = [], 0


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
