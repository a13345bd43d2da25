"""Official checkpoint -> converted folder, streamed: `python -m converters.from_hf SRC DST`.

    DST/config.json, tokenizer files     copied
    DST/token_map.npy                    Engram classes of the token ids (token_map.py)
    DST/weights/<leaf>/                  zarr3 leaves, one orbax checkpoint (store.py)
    DST/source/<shard>.header, index     raw headers of the source, to write it back byte for byte
    DST/manifest.json                    format version, source identity, sha256 of every tensor

Leaves are written in the order of the tree, a shard file at a time: read the rows that fill it,
hash them, hand them to tensorstore, and make finished files durable in the background. What is in
flight is bounded by the memory budget, so a 100 GB table costs no more than a small one. A killed
run resumes where its journal ends (target.py); only the last rename gives the folder its name.
"""

import argparse
import collections
import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from converters import plan, store
from converters import safetensors_io as st
from converters.check import examine
from converters.converted import FORMAT, FORMAT_VERSION, MANIFEST, SOURCE, TOKEN_MAP, WEIGHTS
from converters.progress import Progress
from converters.recipes import raw
from converters.source import INDEX, TOKENIZER_FILES, CheckpointError, Source, resolve
from converters.target import Target, refuse_nesting
from converters.token_map import token_map

MIB = 2**20
SHARD_BYTES = 64 * MIB
COPIES = 4  # of a shard in flight: our buffer, tensorstore's chunks, their encoding, one to spare
COMMIT_BYTES = 256 * MIB
READ_BYTES = 8 * MIB
MOST_FLIGHTS = 32


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    memory: int = 1024 * MIB,
    workers: int = 2,
    text_only: bool = False,
    only: Sequence[str] = (),
    restart: bool = False,
    quiet: bool = False,
) -> Path:
    """Convert a checkpoint folder; returns the finished folder.

    memory: budget in bytes for what is in flight, over the interpreter's own. workers: threads that
    read and hash. only: path prefixes to keep (a slice). restart: discard an interrupted run.
    Raises `CheckpointError` (one line a finding); nothing is written if the source is at fault.
    """
    if memory < 16 * MIB:
        raise CheckpointError([f"memory = {memory}: expected at least {16 * MIB} bytes"])
    source, destination = Path(source), Path(destination)
    refuse_nesting(source, destination)
    checked = examine(source)
    job = plan.job(checked, text_only, only)
    classes = _classes(checked.source, job)
    shard_bytes = min(SHARD_BYTES, memory // (2 * COPIES))
    identity = checked.source.identity()
    basis = {
        "format": [FORMAT, FORMAT_VERSION],
        "source": identity,
        "options": job.options,
        "shard size (--memory)": shard_bytes,
    }
    target = Target(destination, basis, restart)
    try:
        work = _Conversion(job, target, memory // COPIES, shard_bytes, workers)
        target.require_space(work.remaining)
        with Progress("convert", job.table.nbytes, work.finished, quiet=quiet) as progress:
            digests = work.run(progress)
        _copy_files(checked.source, job, target.path, classes)
        store.write_metadata(target.path / WEIGHTS, job.table.params)
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "options": job.options,
            "source": identity,
            "tensors": {name: digests[name] for name in job.table.by_name},
        }
        return target.finish(json.dumps(manifest, indent=1).encode() + b"\n", MANIFEST)
    except OSError as error:
        raise CheckpointError([f"{target.path}: {error}; run again to resume"]) from error
    finally:
        target.close()


def _classes(source: Source, job: plan.Job) -> np.ndarray | None:
    """The token map, or None for a model without Engram."""
    cfg = job.cfg
    if not cfg.engram_layer_ids:
        return None
    try:
        file = source.path / "tokenizer.json"
        return token_map(file, cfg.vocab_size, cfg.engram_compressed_vocab_size)
    except ValueError as error:
        raise CheckpointError([str(error)]) from None


def _copy_files(source: Source, job: plan.Job, target: Path, classes: np.ndarray | None) -> None:
    (target / "config.json").write_bytes(job.config)
    for name in TOKENIZER_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, target / name)
    if classes is not None:
        np.save(target / TOKEN_MAP, classes)
    kept = target / SOURCE
    kept.mkdir(exist_ok=True)
    shutil.copyfile(source.path / "config.json", kept / "config.json")
    for name, header in source.headers.items():
        (kept / f"{name}.header").write_bytes(header.raw)
    if (source.path / INDEX).is_file():
        shutil.copyfile(source.path / INDEX, kept / INDEX)


@dataclasses.dataclass
class _Flight:
    """A piece that is being hashed and, unless an earlier run wrote it, written."""

    piece: plan.Piece
    nbytes: int
    written: Any
    hashed: Future[dict[str, str]]


class _Conversion:
    """The loop over pieces: read ahead of what is hashed, written and made durable."""

    def __init__(
        self, job: plan.Job, target: Target, in_flight: int, shard_bytes: int, workers: int
    ):
        self._job, self._target, self._in_flight = job, target, in_flight
        self._plan = list(plan.pieces(job.table, shard_bytes))
        self._weights = target.path / WEIGHTS
        self._weights.mkdir(exist_ok=True)
        self._context = store.context(max(2, workers))
        self._workers = workers
        self._digests = {
            name: digest
            for record in target.done.values()
            for name, digest in record["sha256"].items()
        }
        self._hashers: dict[str, Any] = {}
        self._flights: collections.deque[_Flight] = collections.deque()
        self._landed: list[tuple[str, Path, Mapping[str, Any]]] = []
        self._landed_bytes = 0
        everything = [piece for _, _, found in self._plan for piece in found]
        sizes = {piece.key: plan.nbytes(job.table.params, piece) for piece in everything}
        self.remaining = sum(size for key, size in sizes.items() if key not in target.done)
        self.finished = sum(sizes[piece.key] for piece in everything if self._is_settled(piece))

    def _is_settled(self, piece: plan.Piece) -> bool:
        """Written by an earlier run, and the digest of each of its tensors is known."""
        known = all(part.entry.name in self._digests for part in piece.parts)
        return piece.key in self._target.done and known

    def run(self, progress: Progress) -> dict[str, str]:
        """Write what is left; sha256 of every tensor by name."""
        self._progress = progress
        with (
            ThreadPoolExecutor(self._workers, "read") as self._readers,
            ThreadPoolExecutor(self._workers, "hash") as self._hash_pool,
            ThreadPoolExecutor(1, "commit") as self._committer,
            st.Reader() as self._reader,
        ):
            self._commit: Future[None] = self._committer.submit(lambda: None)
            try:
                for leaf, cut, found in self._plan:
                    self._write_leaf(leaf, cut, found)
                while self._flights:
                    self._land()
                self._flush()
                self._commit.result()
            finally:
                for flight in self._flights:  # nothing writes once the lock is given back
                    if flight.written is not None:
                        flight.written.commit.exception()
        return self._digests

    def _write_leaf(self, leaf: str, cut: store.Grid, found: Sequence[plan.Piece]) -> None:
        waiting = [piece for piece in found if not self._is_settled(piece)]
        if waiting:
            param = self._job.table.params[leaf]
            array = store.create(self._weights, leaf, param, cut, self._context)
            for piece in waiting:
                self._launch(piece, array)

    def _launch(self, piece: plan.Piece, array: Any) -> None:
        size = plan.nbytes(self._job.table.params, piece)
        while self._flights and (
            len(self._flights) >= MOST_FLIGHTS
            or sum(flight.nbytes for flight in self._flights) + size > self._in_flight
        ):
            self._land()
        buffer = np.empty(piece.shape, array.dtype.numpy_dtype)
        self._fill(piece, buffer)
        before = self._flights[-1].hashed if self._flights else None
        hashed = self._hash_pool.submit(self._hash, piece, buffer, before)
        written = None
        if piece.key not in self._target.done:
            written = array[piece.region].write(buffer)
        self._flights.append(_Flight(piece, size, written, hashed))

    def _fill(self, piece: plan.Piece, buffer: np.ndarray) -> None:
        """Read the rows of a piece, large ones in ranges by several threads."""
        reads = []
        for part in piece.parts:
            out, recipe = buffer[part.at], self._job.recipes[part.entry.name]
            row_bytes = max(1, out.nbytes // len(out))
            for begin, end in st.row_slices(len(out), row_bytes, READ_BYTES):
                rows = (part.begin + begin, part.begin + end)
                reads.append((recipe, *rows, out[begin:end]))
        list(self._readers.map(lambda read: read[0].fill(self._reader, *read[1:]), reads))

    def _hash(
        self, piece: plan.Piece, buffer: np.ndarray, before: Future[dict[str, str]] | None
    ) -> dict[str, str]:
        """Feed the piece's tensors to their digests; the digests that end here."""
        if before is not None and piece.parts[0].begin:
            before.result()  # a tensor's earlier rows go first
        ended = {}
        for part in piece.parts:
            name = part.entry.name
            hasher = self._hashers.pop(name, None) or hashlib.sha256()
            hasher.update(raw(buffer[part.at]))
            if part.last:
                ended[name] = hasher.hexdigest()
            else:
                self._hashers[name] = hasher
        return ended

    def _land(self) -> None:
        """Wait for the oldest piece and queue it for the journal."""
        flight = self._flights.popleft()
        ended = flight.hashed.result()
        self._digests |= ended
        if flight.written is not None:
            store.wait(flight.written)
        file = self._weights / store.folder_name(flight.piece.leaf) / flight.piece.file
        self._landed.append((flight.piece.key, file, {"sha256": ended}))
        self._landed_bytes += flight.nbytes
        self._progress.advance(flight.nbytes, flight.piece.leaf)
        if self._landed_bytes >= COMMIT_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Make what has landed durable in the background, one batch at a time."""
        self._commit.result()
        self._commit = self._committer.submit(self._target.commit, self._landed)
        self._landed, self._landed_bytes = [], 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0: converted, 2: refused or failed, one line a finding on stderr."""
    parser = argparse.ArgumentParser(prog="python -m converters.from_hf", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", help="checkpoint folder, or a Hugging Face Hub id")
    parser.add_argument("destination", help="folder to create")
    parser.add_argument("--revision", help="of a Hub id")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB", help="budget (1024)")
    parser.add_argument("--workers", type=int, default=2, help="reading and hashing threads (2)")
    parser.add_argument("--text-only", action="store_true", help="leave the vision tower out")
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="keep a path")
    parser.add_argument("--restart", action="store_true", help="discard an interrupted run")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    try:
        done = convert(
            resolve(options.source, options.revision),
            options.destination,
            memory=options.memory * MIB,
            workers=options.workers,
            text_only=options.text_only,
            only=options.only,
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
