"""Converted folder -> sharded safetensors with index and config: `python -m converters.to_hf`.

A native conversion kept the raw headers of its source, so the way back writes the same shard files
with the same headers, and every tensor's bytes are checked against the sha256 that the conversion
computed on the way in: the files come out equal to the source's, byte for byte. A conversion that
left something out (text only, a slice) is written under the same official names in new shards.

Streamed by tensor and by row slice, resumed by shard, and finished by one rename, like `from_hf`.
"""

import argparse
import collections
import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from converters import safetensors_io as st
from converters.converted import SOURCE, Converted, open_converted
from converters.names import Entry
from converters.progress import Progress
from converters.recipes import raw
from converters.source import INDEX, TOKENIZER_FILES, CheckpointError
from converters.target import Target, refuse_nesting
from converters.workers import Workers, default

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
    source, destination = Path(source), Path(destination)
    refuse_nesting(source, destination)
    opened = open_converted(source)
    shards = list(plan(opened))
    pool = Workers(default() if workers is None else workers)
    limit = min(SLICE_BYTES, memory // (COPIES * pool.count))
    basis = {key: opened.manifest[key] for key in ("source", "options")} | {"direction": "to_hf"}
    target = Target(destination, basis, restart)
    try:
        todo = [shard for shard in shards if shard.name not in target.done]
        remaining = sum(shard.nbytes for shard in todo)
        target.require_space(remaining)
        total = sum(shard.nbytes for shard in shards)
        with Progress("write", total, total - remaining, quiet=quiet) as progress:

            def write(shard: Shard) -> None:
                file = target.path / shard.name
                st.write(file, shard.header, _data(opened, shard, limit, pool, progress))
                target.commit([(shard.name, file, {})])

            pool.run(write, todo)
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
    except OSError as error:
        raise CheckpointError([f"{target.path}: {error}; run again to resume"]) from error
    finally:
        target.close()


def plan(opened: Converted) -> Iterator[Shard]:
    """The files to write: the source's own, or new ones of at most `SHARD_BYTES`."""
    if opened.is_exact:
        spelled = opened.manifest["names"]
        places: dict[str, list[tuple[int, Entry]]] = collections.defaultdict(list)
        for name, entry in opened.table.by_name.items():
            source, offset = spelled.get(name, (name, 0))
            places[source].append((offset, entry))
        for name in opened.manifest["source"]["files"]:
            block = (opened.path / SOURCE / f"{name}.header").read_bytes()
            found = [item for item in json.loads(block[8:]).items() if item[0] != "__metadata__"]
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


def _data(
    opened: Converted, shard: Shard, limit: int, pool: Workers, progress: Progress
) -> Iterator[Any]:
    """The bytes of a shard's tensors, in slices, each tensor checked as it ends."""
    for entry in shard.entries:
        hasher = hashlib.sha256()
        for rows in opened.slices(entry, limit):
            pool.check()
            data = raw(rows)
            hasher.update(data)
            yield data
            progress.advance(len(data), entry.name)
        if hasher.hexdigest() != opened.manifest["tensors"][entry.name]:
            raise CheckpointError(
                [f"{opened.path}: {entry.name}: its bytes are not those that were converted"]
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0: written, 2: refused or failed, one line a finding on stderr."""
    parser = argparse.ArgumentParser(prog="python -m converters.to_hf", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", help="converted folder")
    parser.add_argument("destination", help="folder to create")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB", help="budget (1024)")
    parser.add_argument("--workers", type=int, help=f"threads ({default()})")
    parser.add_argument("--restart", action="store_true", help="discard an interrupted run")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    try:
        done = convert(
            options.source,
            options.destination,
            memory=options.memory * MIB,
            workers=options.workers,
            restart=options.restart,
            quiet=options.quiet,
        )
    except CheckpointError as error:
        for line in error.problems:
            print(line, file=sys.stderr)
        return 2
    print(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
