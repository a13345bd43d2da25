"""What a conversion writes: the tree it aims at, cut into pieces of one shard file each.

A `Job` is a target config with its name table and a recipe for each tensor. The native job copies
every tensor; others dequantise matrices to bfloat16, drop the vision tower (the config loses
`vision_config`), or keep only some paths of the tree, which is how one layer of the real model
becomes a benchmark's checkpoint.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from converters import names, recipes
from converters.check import Checked
from converters.grid import Grid, Region, grid
from converters.source import CheckpointError
from deepinfer_jax.config import ModelConfig

TARGETS = ("native", "bf16")


@dataclasses.dataclass(frozen=True)
class Job:
    """config: bytes of the config.json to write. options: what differs from a native copy."""

    config: bytes
    cfg: ModelConfig
    table: names.Table
    recipes: Mapping[str, recipes.Recipe]
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows [begin, end) of a tensor, and the index of its matrix in the piece's region."""

    entry: names.Entry
    begin: int
    end: int
    at: tuple[int, ...]

    @property
    def last(self) -> bool:
        return self.end == self.entry.shape[0]


@dataclasses.dataclass(frozen=True)
class Piece:
    """One shard file of a leaf, `file` relative to the leaf's folder, and the rows that fill it."""

    leaf: str
    file: str
    region: Region
    parts: tuple[Part, ...]

    @property
    def key(self) -> str:
        return f"{self.leaf}/{self.file}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.stop - axis.start for axis in self.region)


def job(
    checked: Checked, target: str = "native", text_only: bool = False, only: Sequence[str] = ()
) -> Job:
    """What to write of a checkpoint: its own bits, or narrowed or widened on request.

    target: "native", or "bf16" (all matrices but the Engram tables dequantised, exactly). only:
    path prefixes of the tree (`layers/3`, `embed`); the result is a slice, not a model.
    """
    cfg, config, table = checked.cfg, dict(checked.config), checked.table
    found, options = checked.recipes, {}
    if target not in TARGETS:
        raise CheckpointError([f"target = {target!r}; expected one of {', '.join(TARGETS)}"])
    if target == "bf16":
        options["target"] = target
        config.pop("quantization_config", None)
    if text_only:
        options["text_only"] = True
        config.pop("vision_config", None)
    if options:
        cfg = ModelConfig.from_hf(config)
        table = names.table(cfg)
        found, _, problems = recipes.build(cfg, table, checked.stored)
        if problems:
            raise CheckpointError(problems)
    if only:
        options["only"] = sorted(only)
        kept = [leaf for leaf in table.by_leaf if names.under(leaf, only)]
        lonely = [path for path in only if not any(names.under(leaf, [path]) for leaf in kept)]
        if lonely:
            raise CheckpointError([f"--only {lonely[0]}: no leaf of the tree is under this path"])
        table = table.only(kept)
    used = {name: found[name] for name in table.by_name}
    recoded = collections.Counter(type(recipe).__name__.lower() for recipe in used.values())
    if target == "native" and recoded.keys() - {"copy"}:
        options["recoded"] = {kind: n for kind, n in recoded.items() if kind != "copy"}
    same = config == checked.source.config
    written = (checked.source.path / "config.json").read_bytes() if same else _json(config)
    return Job(written, cfg, table, used, options)


def _json(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2).encode() + b"\n"


@dataclasses.dataclass(frozen=True)
class Chain:
    """Pieces of one leaf that go through in order, because a tensor runs on from each to the next.

    A large tensor is one chain; stacked experts are a chain a piece.
    """

    leaf: str
    cut: Grid
    pieces: tuple[Piece, ...]


def chains(table: names.Table, shard_bytes: int) -> Iterator[Chain]:
    """All work, in the order of the tree."""
    for leaf, entries in table.by_leaf.items():
        stack = len(entries[0].index)
        cut = grid(table.params[leaf], stack, shard_bytes)
        by_index = {entry.index: entry for entry in entries}
        linked: list[Piece] = []
        for piece in _pieces(leaf, cut, stack, by_index):
            if linked and not piece.parts[0].begin:
                yield Chain(leaf, cut, tuple(linked))
                linked = []
            linked.append(piece)
        yield Chain(leaf, cut, tuple(linked))


def _pieces(
    leaf: str, cut: Grid, stack: int, by_index: Mapping[tuple[int, ...], names.Entry]
) -> Iterator[Piece]:
    for file, region in cut.shards():
        lead, rows = region[:stack], region[stack]
        parts = []
        for at in np.ndindex(*(axis.stop - axis.start for axis in lead)):
            index = tuple(axis.start + offset for axis, offset in zip(lead, at, strict=True))
            parts.append(Part(by_index[index], rows.start, rows.stop, at))
        yield Piece(leaf, file, region, tuple(parts))


def nbytes(params: Mapping[str, Any], piece: Piece) -> int:
    """Bytes of a piece, without its index."""
    return math.prod(piece.shape) * np.dtype(params[piece.leaf].dtype).itemsize
