"""The programs whose layouts are priced: a decode step and a prefill call, with abstract arguments.

Nothing is allocated: arguments are shapes with shardings, on an abstract mesh by default or on the
devices given. A decode step runs every sequence's newest token and its drafts through the model,
takes the greedy tokens and drafts the next block; a prefill call runs whole prompts through the
encoder half and what the replay mode keeps of them through the decoder half.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from deepinfer_jax import spec
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.layout import Layout
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model import context as context_parallel
from deepinfer_jax.model import dspark, parallel, transformer
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.cache import PAGE, Cache
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.head import head_logits
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.spec import Param


class Program(NamedTuple):
    """function and args for ``jax.jit(function).lower(*args)``; the cache is argument 1.

    tokens: what one execution processes or produces on all devices. used: share of expert buffer
    rows that carry a token on average.
    """

    function: Callable[..., Any]
    args: tuple
    tokens: float
    used: float


def parameters(cfg: ModelConfig, layout: Layout) -> dict[str, Param]:
    """Path -> declaration of every text parameter as it lies on the layout's devices.

    Raises ValueError for a layout that the model does not implement.
    """
    parallel.check(layout, cfg)
    return spec.flatten(_weights(cfg, layout))


def group(path: str) -> str:
    """Row of the memory table of an argument: experts, weights, engram or cache."""
    if path.startswith("0/"):
        if "/engram/table/" in path:
            return "engram"
        return "experts" if "/ffn/w13" in path or "/ffn/w2" in path else "weights"
    return "cache" if path.startswith("1/") else "inputs"


def decode(
    cfg: ModelConfig,
    layout: Layout,
    numerics: Numerics,
    *,
    batch: int,
    context: int,
    accepted: float = 1.0,
    devices: Sequence[Any] | None = None,
) -> Program:
    """One decode step of ``batch`` sequences (all devices together) of ``context`` tokens each.

    With a drafter 1 + block rows a sequence are verified and a new block is drafted. accepted:
    tokens that a step gives a sequence, for tokens a second.
    """
    setup = Setup(cfg, layout, numerics=numerics, phase="decode")
    parallel.check(layout, cfg, "decode")
    width = 1 + (cfg.dspark_block_size if cfg.has_draft else 0)
    weights = _weights(cfg, layout)
    held = -(-context // PAGE)
    cache = caches.abstract(cfg, numerics, slots=batch, pages=batch * held)

    def local(weights: Weights, cache: Cache, tokens: Array, start: Array, pages: Array) -> Any:
        groups = tokens.shape[0]
        count = jnp.full((groups,), width, jnp.int32)
        slot = jnp.arange(groups, dtype=jnp.int32)
        rows = row_lists.rectangle(tokens, start=start, count=count, slot=slot, pages=pages)
        out = transformer.trunk(setup, weights, rows, cache, Capture())
        x = transformer.collapse(setup, weights, out.hidden, Capture())
        logits = head_logits(setup, x, weights.norm, weights.head)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if weights.draft is None or out.taps is None:
            return token, out.cache
        cache = dspark.remember(setup, weights.draft, rows, out.cache, out.taps)
        block = row_lists.rectangle(
            jnp.full_like(tokens[:, 1:], cfg.dspark_noise_token_id),
            start=start + width,
            count=count - 1,
            slot=slot,
            pages=pages,
        )
        state = dspark.draft_block(
            setup, weights.draft, weights.embed, weights.head, block, cache, Capture()
        )
        drafts, _, _ = dspark.draft_greedy(setup, weights.draft, state, token[rows.last()])
        return (token, drafts), cache

    inputs = (
        Param((batch, width), "int32", ("slots", None)),
        Param((batch,), "int32", ("slots",)),
        Param((batch, held), "int32", ("slots", None)),
    )
    program = _program(layout, "decode", local, (weights, cache, *inputs), devices)
    rows = batch * width // layout.ways("rows", "decode")
    return Program(*program, tokens=batch * accepted, used=_used(cfg, layout, "decode", rows))


def prefill(
    cfg: ModelConfig,
    layout: Layout,
    numerics: Numerics,
    *,
    batch: int,
    context: int,
    devices: Sequence[Any] | None = None,
) -> Program:
    """Whole prompts of ``context`` tokens, ``batch`` of them at once on all devices together."""
    setup = Setup(cfg, layout, numerics=numerics, phase="prefill")
    parallel.check(layout, cfg, "prefill")
    weights = _weights(cfg, layout)
    held = -(-context // PAGE)
    cache = caches.abstract(cfg, numerics, slots=batch, pages=batch * held)
    keep = cfg.replay_keep if numerics.replay == "compact" else None

    def local(weights: Weights, cache: Cache, tokens: Array, pages: Array) -> Any:
        groups, length = tokens.shape
        start = jnp.zeros((groups,), jnp.int32)
        rows = row_lists.rectangle(
            tokens,
            start=start,
            count=jnp.full((groups,), length, jnp.int32),
            slot=jnp.arange(groups, dtype=jnp.int32),
            pages=pages,
            floor=None if keep is None else start + length - keep,
        )
        rows = context_parallel.split(rows, layout, "prefill")
        out = transformer.trunk(setup, weights, rows, cache, Capture(), keep=keep)
        x = transformer.collapse(setup, weights, out.hidden, Capture())
        x = context_parallel.fetch(out.rows, x, out.rows.everyone.last())
        logits = head_logits(setup, x, weights.norm, weights.head)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), out.cache

    inputs = (
        Param((batch, context), "int32", ("slots", None)),
        Param((batch, held), "int32", ("slots", None)),
    )
    program = _program(layout, "prefill", local, (weights, cache, *inputs), devices)
    rows = batch * context // layout.ways("rows", "prefill")
    return Program(
        *program, tokens=float(batch * context), used=_used(cfg, layout, "prefill", rows)
    )


PHASES: Mapping[str, Callable[..., Program]] = {"decode": decode, "prefill": prefill}


def target(
    devices: Sequence[Any],
    *,
    model: str,
    layout: str,
    axes: Mapping[str, int],
    phase: str,
    batch: int,
    context: int,
    numerics: str = "reference",
    ragged: bool = True,
) -> tuple[Callable[..., Any], tuple, Layout, tuple[int, ...]]:
    """A program for ``lab.simulate.in_child``: paths and numbers in, shardings on real devices.

    ragged: False where the backend has no ragged exchange; rounds of a fixed size take its place.
    """
    under = Layout.from_toml(layout, axes)
    if not ragged and under.moe_dispatch == "ragged":
        under = dataclasses.replace(under, moe_dispatch="alltoall")
    cfg = ModelConfig.from_json(model)
    found = PHASES[phase](
        cfg, under, Numerics.preset(numerics), batch=batch, context=context, devices=devices
    )
    return found.function, found.args, under, (1,)


def _weights(cfg: ModelConfig, layout: Layout) -> Weights:
    classes = Param((cfg.vocab_size,), "int32", (None,)) if cfg.engram_layer_ids else None
    declared = dataclasses.replace(
        transformer.abstract(cfg),
        vision=None,
        image_start=None,
        image_end=None,
        image_newline=None,
        token_map=classes,
    )
    return parallel.placed(declared, layout)


def _program(
    layout: Layout,
    phase: str,
    local: Callable[..., Any],
    declared: tuple,
    devices: Sequence[Any] | None,
) -> tuple[Callable[..., Any], tuple]:
    mesh = layout.abstract_mesh if devices is None else layout.mesh(devices[: layout.size])

    def argument(path: tuple[Any, ...], param: Param) -> jax.ShapeDtypeStruct:
        name = spec.path_name(path)
        sharding = layout.sharding(param.axes, param.shape, mesh, name)
        return jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype), sharding=sharding)

    args = jax.tree_util.tree_map_with_path(argument, declared)
    specs = tuple(parallel.specs(one, layout) for one in declared)
    own = layout.spec(("slots",), (declared[2].shape[0],), "sequences", phase)
    return parallel.spmd(layout, local, specs, (own, specs[1])), args


def _used(cfg: ModelConfig, layout: Layout, phase: str, rows: int) -> float:
    """Share of the rows given to the grouped products that have an expert here, if routing is
    even. rows: of one shard."""
    shards = layout.ways("expert")
    if shards == 1:
        return 1.0
    if layout.moe_dispatch == "gather":
        return 1.0 / shards
    same = shards
    for axis in set(layout.mesh_axes("expert")) & set(layout.mesh_axes("rows", phase)):
        same //= layout.axis_size(axis)
    pairs = -(-rows // same) * cfg.num_experts_per_tok
    return min(1.0, pairs / (shards * parallel.capacity(pairs, shards, layout)))
