"""Official checkpoint -> converted folder, streamed: `python -m converters.from_hf SRC DST`.

    DST/config.json, tokenizer files     copied
    DST/token_map.npy                    Engram classes of the token ids (token_map.py)
    DST/weights/<leaf>/                  zarr3 leaves, one orbax checkpoint (store.py)
    DST/source/<shard>.header, index     raw headers of the source, to write it back byte for byte
    DST/manifest.json                    format version, source identity, sha256 of every tensor

Leaves are written in the order of the tree by a few workers, a shard file at a time: a few rows
are read, hashed, and written to their chunks while they are still in the processor's cache;
finished files are made durable in the background. A 100 GB table costs no more memory than a small
one. A killed run resumes where its journal ends (target.py); only the last rename gives the folder
its name.
"""

import argparse
import hashlib
import json
import math
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from converters import check, plan, store
from converters import safetensors_io as st
from converters.converted import FORMAT, FORMAT_VERSION, MANIFEST, SOURCE, TOKEN_MAP, WEIGHTS
from converters.progress import RESUMES, Progress, reported
from converters.recipes import Copy, raw
from converters.shards import ShardWriter
from converters.source import INDEX, TOKENIZER_FILES, CheckpointError, LossWarning, Source, resolve
from converters.target import COMMIT_BYTES, Committer, Target, Written, refuse_nesting
from converters.token_map import token_map
from converters.workers import Workers, budget, default

MIB = 2**20
SHARD_BYTES = 64 * MIB
BLOCK_BYTES = MIB  # about a processor's second-level cache
COPIES = 4  # of a worker's block: read, converted, cut into chunks, one to spare


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    memory: int = 1024 * MIB,
    workers: int | None = None,
    target: str = "native",
    text_only: bool = False,
    only: Sequence[str] = (),
    restart: bool = False,
    quiet: bool = False,
) -> Path:
    """Convert a checkpoint folder; returns the finished folder.

    memory: budget in bytes for the workers' buffers, over the interpreter's own memory. workers:
    threads. target: "native" or "bf16". only: path prefixes to keep (a slice). restart: discard an
    interrupted run.
    Raises `CheckpointError` (one line a finding); nothing is written if the source is at fault.
    """
    workers, block = budget(memory, workers, COPIES, BLOCK_BYTES)
    source, destination = Path(source), Path(destination)
    refuse_nesting(source, destination)
    checked = check.examine(source)
    job = plan.job(checked, target, text_only, only)
    if rounded := check.rounded(job.recipes):
        warnings.warn(rounded, LossWarning, stacklevel=2)
    classes = _classes(checked.source, job)
    identity = checked.source.identity()
    times = checked.source.times()
    basis = {
        "format": [FORMAT, FORMAT_VERSION],
        "source": identity,
        "times of the source's files": times,
        "options": job.options,
    }
    folder = Target(destination, basis, restart)
    try:
        work = _Conversion(job, folder, workers, block)
        folder.require_space(work.remaining)
        with Progress("convert", job.table.nbytes, work.finished, quiet=quiet) as progress:
            digests = work.run(progress)
        if checked.source.times() != times:
            raise CheckpointError([f"{source}: its files changed while they were converted"])
        _copy_files(checked.source, job, folder.path, classes)
        store.write_metadata(folder.path / WEIGHTS, job.table.params)
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "options": job.options,
            "source": identity,
            "names": _spelled(job),
            "tensors": {name: digests[name] for name in job.table.by_name},
        }
        return folder.finish(json.dumps(manifest, indent=1).encode() + b"\n", MANIFEST)
    except (OSError, st.FormatError) as error:
        raise CheckpointError([f"{folder.path}: {error}; run again to resume"]) from error
    finally:
        folder.close()


def _spelled(job: plan.Job) -> dict[str, list[Any]]:
    """official name -> [source tensor, byte offset in it], where these are not the same."""
    return {
        name: [recipe.stored.tensor.name, recipe.stored.offset]
        for name, recipe in job.recipes.items()
        if isinstance(recipe, Copy) and (recipe.stored.tensor.name != name or recipe.stored.offset)
    }


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


class _Conversion:
    """Chains of pieces through a pool of workers, and finished pieces into the journal."""

    def __init__(self, job: plan.Job, target: Target, workers: int, block: int):
        self._job, self._target = job, target
        self._workers, self._block = Workers(workers), block
        self._chains = list(plan.chains(job.table, SHARD_BYTES))
        self._weights = target.path / WEIGHTS
        self._weights.mkdir(exist_ok=True)
        self._digests = {
            name: digest
            for record in target.done.values()
            for name, digest in record["sha256"].items()
        }
        self._lock = threading.Lock()
        pieces = [piece for chain in self._chains for piece in chain.pieces]
        sizes = {piece.key: plan.nbytes(job.table.params, piece) for piece in pieces}
        self.remaining = sum(size for key, size in sizes.items() if key not in target.done)
        self.finished = sum(
            sizes[piece.key]
            for chain in self._chains
            if self._is_settled(chain)
            for piece in chain.pieces
        )

    def _is_settled(self, chain: plan.Chain) -> bool:
        """Written by earlier runs as a whole, so that the digests of its tensors are known."""
        return all(piece.key in self._target.done for piece in chain.pieces)

    def run(self, progress: Progress) -> dict[str, str]:
        """Write what is left; sha256 of every tensor by name."""
        self._progress = progress
        waiting = [chain for chain in self._chains if not self._is_settled(chain)]
        for leaf, cut in {chain.leaf: chain.cut for chain in waiting}.items():
            store.create(self._weights, leaf, self._job.table.params[leaf], cut)
        with Committer(self._target, COMMIT_BYTES) as self._committer:
            self._workers.run(self._write_chain, waiting)
        return self._digests

    def _write_chain(self, chain: plan.Chain) -> None:
        param = self._job.table.params[chain.leaf]
        itemsize = np.dtype(param.dtype).itemsize
        hasher = hashlib.sha256()
        with st.Reader() as reader:
            for piece in chain.pieces:
                file = self._weights / store.folder_name(piece.leaf) / piece.file
                digests: dict[str, str] = {}
                with ExitStack() as stack:
                    writer = None
                    if piece.key not in self._target.done:
                        shard = ShardWriter(file, chain.cut, piece.shape, itemsize)
                        writer = stack.enter_context(shard)
                    for part in piece.parts:
                        for begin, block in self._blocks(reader, part, param.dtype):
                            hasher.update(raw(block))
                            if writer is not None:  # else it is there, and only the digest is not
                                writer.write(part.at, begin, block)
                            self._progress.advance(block.nbytes, chain.leaf)
                        if part.last:
                            digests[part.entry.name] = hasher.hexdigest()
                            hasher = hashlib.sha256()
                    if writer is not None:
                        writer.finish()
                self._land(piece, file, digests)

    def _blocks(
        self, reader: st.Reader, part: plan.Part, dtype: str
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(first row within the part, rows), a block at a time, in one buffer."""
        recipe, shape = self._job.recipes[part.entry.name], part.entry.shape[1:]
        row_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        rows = part.end - part.begin
        buffer = np.empty((min(rows, max(1, self._block // row_bytes)), *shape), dtype)
        for begin, end in st.row_slices(rows, row_bytes, self._block):
            self._workers.check()
            block = buffer[: end - begin]
            recipe.fill(reader, part.begin + begin, part.begin + end, block)
            yield begin, block

    def _land(self, piece: plan.Piece, file: Path, digests: Mapping[str, str]) -> None:
        """Take the digests of a finished piece, and queue it for the journal if it is new."""
        with self._lock:
            self._digests |= digests
        if piece.key not in self._target.done:
            size = file.stat().st_size
            facts = {"sha256": digests}
            self._committer.add(Written(piece.key, file, size, whole=True, facts=facts), size)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0: converted, 2: refused or failed, 130: interrupted (`reported`)."""
    parser = argparse.ArgumentParser(prog="python -m converters.from_hf", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", help="checkpoint folder, or a Hugging Face Hub id")
    parser.add_argument("destination", help="folder to create")
    parser.add_argument("--revision", help="of a Hub id")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB", help="of buffers (1024)")
    parser.add_argument("--workers", type=int, help=f"threads ({default()})")
    parser.add_argument("--target", default="native", choices=plan.TARGETS)
    parser.add_argument("--text-only", action="store_true", help="leave the vision tower out")
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="keep a path")
    parser.add_argument("--restart", action="store_true", help="discard an interrupted run")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    return reported(
        lambda: convert(
            resolve(options.source, options.revision),
            options.destination,
            memory=options.memory * MIB,
            workers=options.workers,
            target=options.target,
            text_only=options.text_only,
            only=options.only,
            restart=options.restart,
            quiet=options.quiet,
        ),
        RESUMES,
    )


if __name__ == "__main__":
    sys.exit(main())
