"""A finished converted folder, opened: its manifest, its config, and its leaves by region.

`is_converted` tells it from an official folder. Opening checks the format version and that the
leaves there are exactly those the config declares (or, for a slice, those the manifest says were
kept); a leaf is checked again, shape and dtype, when it is opened, and a missing or truncated shard
is an error of the read that meets it.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from converters import names, store
from converters.grid import Grid, Region
from converters.shards import ShardReader
from converters.source import CheckpointError
from deepinfer_jax.config import ModelConfig

FORMAT, FORMAT_VERSION = "deepinfer_jax.converted", 1
MANIFEST, TOKEN_MAP, WEIGHTS, SOURCE = "manifest.json", "token_map.npy", "weights", "source"
PARTIAL = ".partial"


@dataclasses.dataclass(frozen=True)
class Converted:
    """`table` holds the leaves that are there; `manifest` is the parsed manifest.json."""

    path: Path
    cfg: ModelConfig
    manifest: dict[str, Any]
    table: names.Table
    context: ts.Context

    @functools.cached_property
    def _open(self) -> dict[str, Any]:
        return {}

    def leaf(self, path: str) -> Any:
        """The tensorstore of a leaf, opened once; `CheckpointError` if it is not as declared."""
        if path not in self._open:
            try:
                found = store.open_leaf(
                    self.path / WEIGHTS, path, self.table.params[path], self.context
                )
            except OSError as error:
                raise CheckpointError([str(error)]) from None
            self._open[path] = found
        return self._open[path]

    def read(self, path: str, region: Region) -> np.ndarray:
        """A region of a leaf; reads the chunks that it touches and no others."""
        try:
            return store.wait(self.leaf(path)[region].read())
        except OSError as error:
            where = self.path / WEIGHTS / store.folder_name(path)
            raise CheckpointError([f"{where}: {error}"]) from error

    def slices(self, entry: names.Entry, limit: int, start: int = 0) -> Iterator[np.ndarray]:
        """A tensor from byte `start` (of a row) on, in row slices of at most `limit` bytes.

        What is read is what is returned; the slices share a buffer, so use each before the next.
        """
        leaf, param = self.leaf(entry.leaf), self.table.params[entry.leaf]
        layout = leaf.chunk_layout
        cut = Grid(param.shape, layout.write_chunk.shape, layout.read_chunk.shape)
        itemsize, stack = np.dtype(param.dtype).itemsize, len(entry.index)
        row_bytes = math.prod(entry.shape[1:]) * itemsize
        number = [i // size for i, size in zip(entry.index, cut.shard, strict=False)]
        at = tuple(i % size for i, size in zip(entry.index, cut.shard, strict=False))
        folder = self.path / WEIGHTS / store.folder_name(entry.leaf) / "c"
        tall, skipped = cut.shard[stack], start // row_bytes
        most = min(tall, max(1, limit // row_bytes), entry.shape[0])
        buffer = np.empty((most, *entry.shape[1:]), param.dtype)
        for first in range(skipped - skipped % tall, entry.shape[0], tall):
            numbers = [*number, first // tall, *[0] * (len(entry.shape) - 1)]
            rows = min(tall, entry.shape[0] - first)
            try:
                with ShardReader(folder.joinpath(*map(str, numbers)), cut, itemsize) as shard:
                    for begin in range(max(0, skipped - first), rows, most):
                        out = buffer[: min(most, rows - begin)]
                        shard.fill(at, begin, out)
                        yield out
            except OSError as error:
                raise CheckpointError([str(error)]) from error

    @property
    def is_slice(self) -> bool:
        """Only some paths of the tree were kept: not a whole model."""
        return "only" in self.manifest["options"]

    @property
    def is_exact(self) -> bool:
        """All of the source is here in its own bits, so that its files can be remade."""
        return not self.manifest["options"]

    def token_map(self) -> np.ndarray | None:
        """int32 [vocab]; None for a model without Engram."""
        if not self.cfg.engram_layer_ids:
            return None
        found = np.load(self.path / TOKEN_MAP)
        if found.dtype != np.int32 or found.shape != (self.cfg.vocab_size,):
            raise CheckpointError(
                [
                    f"{self.path / TOKEN_MAP}: {found.dtype}{list(found.shape)}; expected "
                    f"int32[{self.cfg.vocab_size}]"
                ]
            )
        return found


def is_converted(path: Path) -> bool:
    """Whether the folder is a finished conversion, by its manifest."""
    return (path / MANIFEST).is_file()


def refuse_unfinished(path: Path) -> None:
    """`CheckpointError` for a partial folder, and for the absent target of one."""
    partial = path if path.name.endswith(PARTIAL) else path.with_name(path.name + PARTIAL)
    if partial.is_dir() and (path == partial or not path.exists()):
        raise CheckpointError(
            [f"{partial}: an unfinished conversion; run the converter again to finish it"]
        )


def open_converted(path: str | Path, threads: int = 4) -> Converted:
    """Open a converted folder; `CheckpointError` if it is unfinished, foreign or incomplete."""
    path = Path(path)
    refuse_unfinished(path)
    if not is_converted(path):
        raise CheckpointError([f"{path}: no {MANIFEST}; not a converted folder"])
    manifest = _manifest(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError([f"{path / MANIFEST}: format is {manifest.get('format')!r}"])
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            [
                f"{path / MANIFEST}: format_version {manifest.get('format_version')}, this version "
                f"reads {FORMAT_VERSION}; convert the source again"
            ]
        )
    for key in ("options", "source", "names", "tensors"):
        if not isinstance(manifest.get(key), dict):
            raise CheckpointError([f"{path / MANIFEST}: {key}: expected an object"])
    try:
        cfg = ModelConfig.from_json(path)
    except ValueError as error:
        raise CheckpointError([str(error)]) from None
    table = names.table(cfg)
    if only := manifest["options"].get("only"):
        table = table.only([leaf for leaf in table.by_leaf if names.under(leaf, only)])
    problems = _account(path, manifest, table)
    if problems:
        raise CheckpointError(problems)
    return Converted(path, cfg, manifest, table, store.context(threads))


def _manifest(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError([f"{file}: cannot be read as JSON: {error}"]) from None
    if not isinstance(found, dict):
        raise CheckpointError([f"{file}: expected an object"])
    return found


def _account(path: Path, manifest: dict[str, Any], table: names.Table) -> list[str]:
    """Leaves on disk, leaves declared and tensors of the manifest must be the same sets."""
    if not (path / WEIGHTS).is_dir():
        return [f"{path / WEIGHTS}: no such folder"]
    declared = {store.folder_name(leaf) for leaf in table.by_leaf}
    present = {item.name for item in (path / WEIGHTS).iterdir() if item.is_dir()}
    problems = [f"{path / WEIGHTS / name}: declared leaf missing" for name in declared - present]
    problems += [f"{path / WEIGHTS / name}: not a declared leaf" for name in present - declared]
    listed = set(manifest["tensors"])
    for label, differing in (
        ("does not list", set(table.by_name) - listed),
        ("lists undeclared", listed - set(table.by_name)),
    ):
        if differing:
            first = sorted(differing)[0]
            problems.append(
                f"{path / MANIFEST}: {label} {len(differing)} tensor(s), such as {first}"
            )
    return sorted(problems)
