"""Converted folder -> sharded safetensors with index and config: `python -m converters.to_hf`.

A native conversion kept the raw headers of its source, so the way back writes the same shard files
with the same headers, and every tensor's bytes are checked against the sha256 that the conversion
computed on the way in: the files come out equal to the source's, byte for byte. A conversion that
left something out (text only, a slice) is written under the same official names in new shards.

Streamed by tensor and by row slice, and finished by one rename, like `from_hf`. A killed run goes
on inside each file, after the bytes that its journal says are durable; of a tensor cut in two, what
the file already has is read again for the digest, which so covers what was written before the kill.
"""

import argparse
import collections
import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from io import RawIOBase
from pathlib import Path

from converters import safetensors_io as st
from converters.converted import SOURCE, Converted, open_converted
from converters.names import Entry
from converters.progress import RESUMES, Progress, reported
from converters.recipes import raw
from converters.source import INDEX, TOKENIZER_FILES, CheckpointError
from converters.target import COMMIT_BYTES, Committer, Target, Written, refuse_nesting
from converters.workers import Workers, budget, default

MIB = 2**20
SHARD_BYTES = 5 * 10**9
SLICE_BYTES = MIB  # about a processor's second-level cache
COPIES = 4  # of a worker's slice: read, gathered from chunks, written, one to spare


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file to write: its header block, and its tensors in the order of their data."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    memory: int = 1024 * MIB,
    workers: int | None = None,
    restart: bool = False,
    quiet: bool = False,
) -> Path:
    """Write a converted folder back as an official checkpoint; returns the finished folder.

    memory: budget in bytes for the workers' slices. workers: threads. Raises `CheckpointError`,
    also when a tensor's bytes differ from those that were converted.
    """
    workers, limit = budget(memory, workers, COPIES, SLICE_BYTES)
    source, destination = Path(source), Path(destination)
    refuse_nesting(source, destination)
    opened = open_converted(source)
    shards, pool = list(plan(opened)), Workers(workers)
    basis = {key: opened.manifest[key] for key in ("source", "options", "tensors")}
    target = Target(destination, basis | {"direction": "to_hf"}, restart)
    try:
        durable = {name: record["bytes"] for name, record in target.done.items()}
        whole = {name for name, record in target.done.items() if record["whole"]}
        todo = [shard for shard in shards if shard.name not in whole]
        total, done = sum(shard.nbytes for shard in shards), sum(durable.values())
        target.require_space(total - done)
        with (
            Progress("write", total, done, quiet=quiet) as progress,
            Committer(target, COMMIT_BYTES) as committer,
        ):
            work = _Writing(opened, target.path, limit, pool, committer, progress)
            pool.run(lambda shard: work.write(shard, durable.get(shard.name, 0)), todo)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, target.path / name)
        config = source / SOURCE / "config.json" if opened.is_exact else source / "config.json"
        shutil.copyfile(config, target.path / "config.json")
        if opened.is_exact and (source / SOURCE / INDEX).is_file():
            return target.finish((source / SOURCE / INDEX).read_bytes(), INDEX)
        placed = {entry.name: shard.name for shard in shards for entry in shard.entries}
        index = {"metadata": {"total_size": opened.table.nbytes}, "weight_map": placed}
        return target.finish(json.dumps(index, indent=2).encode() + b"\n", INDEX)
    except (OSError, st.FormatError) as error:
        raise CheckpointError([f"{target.path}: {error}; run again to resume"]) from error
    finally:
        target.close()


def plan(opened: Converted) -> Iterator[Shard]:
    """The files to write: the source's own, or new ones of at most `SHARD_BYTES`.

    Raises `CheckpointError` for a header of the source that is lost.
    """
    if opened.is_exact:
        spelled = opened.manifest["names"]
        places: dict[str, list[tuple[int, Entry]]] = collections.defaultdict(list)
        for name, entry in opened.table.by_name.items():
            source, offset = spelled.get(name, (name, 0))
            places[source].append((offset, entry))
        for name in opened.manifest["source"]["files"]:
            file = opened.path / SOURCE / f"{name}.header"
            try:
                block = file.read_bytes()
                declared = json.loads(block[8:])
            except (OSError, ValueError) as error:
                raise CheckpointError([f"{file}: no header of a shard: {error}"]) from None
            found = [item for item in declared.items() if item[0] != "__metadata__"]
            found.sort(key=lambda item: item[1]["data_offsets"])
            entries = [
                entry
                for tensor, _ in found
                for _, entry in sorted(places[tensor], key=lambda place: place[0])
            ]
            yield Shard(name, block, tuple(entries))
        return
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in opened.table.by_name.values():
        if size and size + entry.nbytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        spelled = [(entry.name, entry.dtype, entry.shape) for entry in group]
        yield Shard(name, st.header_bytes(spelled, {"format": "pt"}), tuple(group))


@dataclasses.dataclass(frozen=True)
class _Writing:
    """Writes shards, each from the byte on that is not durable yet."""

    opened: Converted
    folder: Path
    limit: int
    pool: Workers
    committer: Committer
    progress: Progress

    def write(self, shard: Shard, start: int) -> None:
        """Write a shard from byte `start` on; 0, or where an earlier run was after some slice."""
        path = self.folder / shard.name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        position = committed = start
        try:
            with open(descriptor, "r+b", buffering=0) as file:
                file.truncate(start)
                file.seek(start)
                for data in self._data(shard, file, start):
                    if position - committed >= COMMIT_BYTES:
                        self._commit(path, position, position - committed)
                        committed = position
                    position += _write(file, data)
            st.read_header(path)  # what the header declares and what followed it must agree
        except BaseException:
            self._commit(path, position, position - committed)
            raise
        self._commit(path, position, position - committed, whole=True)

    def _commit(self, path: Path, position: int, more: int, whole: bool = False) -> None:
        """whole: also compared with the digests, to the last tensor."""
        self.committer.add(Written(path.name, path, position, whole), more)

    def _data(self, shard: Shard, file: RawIOBase, start: int) -> Iterator[bytes | memoryview]:
        """The bytes from `start` on, in slices, the digest of each tensor compared at its end."""
        if not start:
            yield shard.header
        end = len(shard.header)
        for entry in shard.entries:
            begin, end = end, end + entry.nbytes
            if end < start:
                continue  # if it ends right there, its digest may not have been compared yet
            hasher = hashlib.sha256()
            for data in self._there(file, begin, start):
                hasher.update(data)
            for rows in self.opened.slices(entry, self.limit, max(0, start - begin)):
                self.pool.check()
                hasher.update(raw(rows))
                yield raw(rows)
                self.progress.advance(rows.nbytes, entry.name)
            if hasher.hexdigest() != self.opened.manifest["tensors"][entry.name]:
                where = f"{self.opened.path}: {entry.name}"
                raise CheckpointError([f"{where}: its bytes are not those that were converted"])

    def _there(self, file: RawIOBase, begin: int, start: int) -> Iterator[bytes]:
        """What the file already has of a tensor that begins at `begin`, up to byte `start`."""
        for at in range(begin, start, self.limit):
            self.pool.check()
            data = os.pread(file.fileno(), min(self.limit, start - at), at)
            yield data


def _write(file: RawIOBase, data: bytes | memoryview) -> int:
    """All of it; the number of bytes."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]
    return len(data)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0: written, 2: refused or failed, 130: interrupted (`reported`)."""
    parser = argparse.ArgumentParser(prog="python -m converters.to_hf", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", help="converted folder")
    parser.add_argument("destination", help="folder to create")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB", help="budget (1024)")
    parser.add_argument("--workers", type=int, help=f"threads ({default()})")
    parser.add_argument("--restart", action="store_true", help="discard an interrupted run")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    return reported(
        lambda: convert(
            options.source,
            options.destination,
            memory=options.memory * MIB,
            workers=options.workers,
            restart=options.restart,
            quiet=options.quiet,
        ),
        RESUMES,
    )


if __name__ == "__main__":
    sys.exit(main())
