"""Slices: the part of a step that one device runs, with synthetic weights in the stored formats.

    layer slice   chosen layers at full width, all experts, nothing around them: residual streams in
                  and out, the cache of the whole model beside them
    rank slice    the engine's own decode or prefill program with every layer, and the share that
                  one rank of an expert-parallel group holds: experts / ranks of each layer, Engram
                  tables of about rows / ranks; everything else whole. What a rank exchanges with
                  others is left out: its own rows' pairs are routed to the experts it holds (drawn
                  evenly, with repetition), as many pairs as a rank gets if routing is even

A `Slice` is declarations: `drawn.materialise` draws them on the device, `spec.abstract` gives their
shapes, so that the released width is traced anywhere and run where it fits. A turn puts lengths,
newest tokens and drafts back to where they were: every step does the same work.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from deepinfer_jax.bench import counts, drawn
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model import attention, engram, engram_hash, hyper, transformer
from deepinfer_jax.model import block as blocks
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model.block import BlockWeights
from deepinfer_jax.model.cache import PAGE, Cache
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.hyper import Hidden
from deepinfer_jax.model.indexer import Selection
from deepinfer_jax.model.norm import Prepared
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime import packing, sampling_state, step
from deepinfer_jax.runtime import prefill as prefill_program
from deepinfer_jax.runtime import state as states
from deepinfer_jax.runtime.step_types import DecodeInput, Options, PrefillInput, look_back, reach
from deepinfer_jax.schedule import LayerPlan
from deepinfer_jax.spec import Param
from deepinfer_jax.structured import PoolManager


class Slice(NamedTuple):
    """turn(weights, carry, given) -> (carry, output), the carry donated. weights, carry, given:
    trees of `Param` (to be drawn) and numpy arrays. needed, executed: work of a turn, as far as
    causal rows need it and as the program's fixed shapes have it. rows: that a turn computes;
    conditions: what a reader must know, as JSON."""

    setup: Setup
    turn: Callable[..., Any]
    weights: Any
    carry: Any
    given: Any
    needed: counts.Work
    executed: counts.Work
    rows: counts.Rows
    conditions: dict[str, Any]


def share(cfg: ModelConfig, ranks: int) -> tuple[ModelConfig, Weights]:
    """Config and declared weights of one rank of an expert-parallel group.

    Raises ValueError if the experts do not divide. A rank holds at least as many experts as a row
    takes; the drafter's router knows only the experts that are here.
    """
    if ranks < 1 or cfg.n_routed_experts % ranks:
        raise ValueError(
            f"ranks = {ranks}; expected a divisor of n_routed_experts = {cfg.n_routed_experts}"
        )
    cfg = _smaller_tables(dataclasses.replace(cfg, vision=None), ranks)
    if cfg.has_draft:
        held = max(cfg.dspark_num_experts_per_tok, cfg.dspark_n_routed_experts // ranks)
        cfg = dataclasses.replace(cfg, dspark_n_routed_experts=held)
    declared = transformer.abstract(cfg)
    held = max(cfg.num_experts_per_tok, cfg.n_routed_experts // ranks)

    def fewer(param: Param) -> Param:
        return dataclasses.replace(param, shape=(held, *param.shape[1:]))

    def held_only(layer: BlockWeights) -> BlockWeights:
        w13, w2 = jax.tree.map(fewer, (layer.ffn.w13, layer.ffn.w2))
        return dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, w13=w13, w2=w2))

    layers = tuple(map(held_only, declared.layers))
    classes = np.arange(cfg.vocab_size) % max(cfg.engram_compressed_vocab_size, 1)
    return cfg, dataclasses.replace(
        declared,
        layers=layers,
        token_map=classes.astype(np.int32) if cfg.engram_layer_ids else None,
    )


def layers(
    cfg: ModelConfig,
    chosen: Sequence[int],
    numerics: Numerics,
    rows: counts.Rows,
    *,
    tables: int = 64,
    kernels: Any = None,
) -> Slice:
    """A layer slice; tables: Engram tables have about 1 / tables of their rows."""
    if not chosen or list(chosen) != sorted(set(chosen)):
        raise ValueError(f"layers: {list(chosen)}; expected increasing layer numbers")
    if outside := [i for i in chosen if not 0 <= i < cfg.num_hidden_layers]:
        raise ValueError(f"layers: no layer {outside[0]}; expected 0..{cfg.num_hidden_layers - 1}")
    cfg = _smaller_tables(dataclasses.replace(cfg, vision=None), tables)
    setup = _setup(cfg, numerics, kernels, "decode" if rows.start else "prefill")
    held = -(-(rows.start + rows.width) // PAGE)
    declared = transformer.abstract(cfg)
    plans = [cfg.plan[i] for i in chosen]
    classes = np.arange(cfg.vocab_size) % max(cfg.engram_compressed_vocab_size, 1)
    first = next((plan for plan in plans if plan.ratio), None)
    weights = tuple(declared.layers[i] for i in chosen)
    rng = np.random.default_rng(0)
    given = {
        "token": drawn.tokens(cfg, rng, (rows.sequences, rows.width)),
        "pages": drawn.pages(rng, rows.sequences, held),
        "routes": drawn.routes(cfg, rng, (rows.count, cfg.num_hidden_layers), cfg.n_routed_experts),
        "token_map": classes.astype(np.int32),
        "streams": Param(
            (rows.count, cfg.hc_mult, cfg.hidden_size), numerics.compute, (None, None, None)
        ),
        "selection": None if first is None else drawn.selection(cfg, rng, rows, first.ratio, held),
    }

    def turn(weights: Any, cache: Cache, given: dict[str, Any]) -> tuple[Cache, Hidden]:
        whole = jnp.full((rows.sequences,), rows.width, jnp.int32)
        listed = row_lists.rectangle(
            given["token"],
            start=jnp.full_like(whole, rows.start),
            count=whole,
            slot=jnp.arange(rows.sequences, dtype=jnp.int32),
            pages=given["pages"],
        )
        pre = jnp.full((rows.count, cfg.hc_mult), 1 / cfg.hc_mult, jnp.float32)
        hidden, selection = hyper.hidden(given["streams"], pre), given["selection"]
        found: dict[int, Int32[Array, "rows columns"]] = {}
        if any(plan.engram for plan in plans):
            found, cache = engram_hash.table_rows(cfg, given["token_map"], listed, cache)
        for plan, layer in zip(plans, weights, strict=True):
            with jax.named_scope(f"layer_{plan.index}"):
                if plan.engram:
                    streams = engram.engram(setup, layer.engram, found[plan.index], hidden.streams)
                    hidden = hyper.hidden(streams, hidden.pre)

                attend = functools.partial(_attend, setup, plan, layer, listed, cache, selection)

                hidden, (cache, selection) = blocks.block(
                    setup,
                    layer,
                    hidden,
                    listed.valid,
                    attend,
                    layer=plan.index,
                    experts_per_token=cfg.num_experts_per_tok,
                    capture=Capture(),
                    routes=given["routes"][:, plan.index],
                )
        return cache, hidden

    phase = counts.decode if rows.start else counts.prefill
    executed = counts.slots(cfg, rows, tokens=held * PAGE)
    return Slice(
        setup,
        turn,
        weights,
        drawn.cache(cfg, numerics, rows.sequences, held),
        given,
        phase(cfg, rows, layers=chosen),
        phase(cfg, rows, layers=chosen, keys=executed),
        rows,
        {
            "slice": "layers",
            "layers": list(chosen),
            "experts_held": cfg.n_routed_experts,
            "engram_rows": list(cfg.engram_num_embeddings),
            "routes": "drawn evenly, with repetition",
        },
    )


def rank(
    cfg: ModelConfig,
    ranks: int,
    numerics: Numerics,
    phase: str,
    rows: counts.Rows,
    *,
    draft: bool = True,
    kernels: Any = None,
) -> Slice:
    """A rank slice. Decode: the last `width` rows of sequences of `start + width` tokens, all
    verified; prefill: whole prompts from position `start` on. draft: a block is drafted too."""
    full = cfg
    cfg, weights = share(cfg, ranks)
    draft = draft and cfg.has_draft
    if not draft:
        weights = dataclasses.replace(weights, draft=None)
    setup = _setup(cfg, numerics, kernels, phase)
    block = cfg.dspark_block_size if draft else 0
    if phase == "decode" and rows.width > 1 + block:
        raise ValueError(f"rows = {rows.width}; expected at most {1 + block}, the draft block + 1")
    held = -(-(rows.start + rows.width) // PAGE)
    experts = jax.tree.leaves(weights.layers[0].ffn.w13)[0].shape[0]
    rng = np.random.default_rng(0)
    pages = drawn.pages(rng, rows.sequences, held)
    state = _state(cfg, numerics, rows.sequences, rows.sequences * held, block)
    pool = _pool(cfg.vocab_size)
    lead = (rows.sequences, rows.width if phase == "prefill" else reach(block))
    routes = drawn.routes(cfg, rng, (*lead, cfg.num_hidden_layers), experts)
    options = Options(block=block)
    build = _decode if phase == "decode" else _prefill
    turn, given = build(setup, options, rows, rng, pages, routes)
    executed = counts.slots(cfg, rows, tokens=held * PAGE, places=1 + block)
    if phase == "decode":
        need = counts.decode(cfg, rows, ranks=ranks, draft=draft)
        does = counts.decode(cfg, rows, ranks=ranks, draft=draft, keys=executed)
    else:
        many = counts.slots(cfg, rows, tokens=held * PAGE)
        keep = counts.Rows(rows.sequences, min(cfg.replay_keep, rows.width), 0)
        replay = numerics.replay
        need = counts.prefill(cfg, rows, ranks=ranks, draft=draft, replay=replay)
        kept = counts.slots(cfg, keep, tokens=held * PAGE)
        does = counts.prefill(
            cfg, rows, ranks=ranks, draft=draft, replay=replay, keys=many, kept_keys=kept
        )
    return Slice(
        setup,
        lambda weights, carry, given: turn(weights, carry, *given),
        weights,
        state,
        (pool, given),
        need,
        does,
        rows,
        {
            "slice": "rank",
            "ranks": ranks,
            "experts_held": [experts, full.n_routed_experts],
            "draft_experts_held": [cfg.dspark_n_routed_experts, full.dspark_n_routed_experts]
            if draft
            else None,
            "engram_rows": [list(cfg.engram_num_embeddings), list(full.engram_num_embeddings)],
            "routes": "to the held experts, drawn evenly, with repetition",
            "network": "left out",
            "draft_block": block,
            "sampling": "greedy",
        },
    )


def _decode(
    setup: Setup,
    options: Options,
    rows: counts.Rows,
    rng: np.random.Generator,
    pages: np.ndarray,
    routes: np.ndarray,
) -> tuple[Callable[..., Any], Any]:
    many, cfg = rows.sequences, setup.cfg
    given = DecodeInput(
        slot=np.arange(many, dtype=np.int32),
        pages=pages,
        room=np.full(many, rows.width - 1, np.int32),
        budget=np.full(many, rows.count - many, np.int32),
        temperature=np.ones((many, options.block), np.float32),
        known=np.full(many, rows.start, np.int32),
        forced=np.full((many, reach(options.block)), -1, np.int32),
        routes=routes,
    )
    again = drawn.tokens(cfg, rng, (many, 1 + options.block))

    def turn(weights: Weights, state: states.State, pool: Any, given: Any) -> Any:
        inputs, again = given
        state = dataclasses.replace(
            state,
            length=jnp.full((many,), rows.start, jnp.int32),
            done=jnp.zeros((many,), jnp.bool_),
            last=again[:, 0],
            drafts=again[:, 1:],
        )
        state, output = step.decode_step(setup, options, rows.count, weights, state, pool, inputs)
        return state, packing.pack(output)

    return turn, (given, again)


def _prefill(
    setup: Setup,
    options: Options,
    rows: counts.Rows,
    rng: np.random.Generator,
    pages: np.ndarray,
    routes: np.ndarray,
) -> tuple[Callable[..., Any], Any]:
    many, cfg = rows.sequences, setup.cfg
    given = PrefillInput(
        token=drawn.tokens(cfg, rng, (many, rows.width)),
        slot=np.arange(many, dtype=np.int32),
        start=np.full(many, rows.start, np.int32),
        count=np.full(many, rows.width, np.int32),
        last=np.ones(many, np.bool_),
        prompt=np.full(many, rows.start + rows.width, np.int32),
        begin=np.zeros(many, np.int32),
        own=np.zeros(many, np.int32),
        before=np.full((many, look_back(cfg)), -1, np.int32),
        following=np.full((many, rows.width), -1, np.int32),
        pages=pages,
        forced=np.full(many, -1, np.int32),
        routes=routes,
    )
    compact = setup.numerics.replay == "compact"
    tail = min(cfg.replay_keep, rows.width) if compact else rows.width

    def turn(weights: Weights, state: states.State, pool: Any, given: Any) -> Any:
        state, output = prefill_program.prefill_chunk(
            setup, options, tail, False, weights, state, pool, given
        )
        return state, packing.pack(output)

    return turn, given


def _attend(
    setup: Setup,
    plan: LayerPlan,
    layer: BlockWeights,
    rows: Rows,
    cache: Cache,
    selection: Selection | None,
    x: Prepared,
) -> tuple[Array, tuple[Cache, Selection | None]]:
    out, cache, selection = attention.attention(
        setup, plan, layer.attn, rows, cache, x, selection, Capture()
    )
    return out, (cache, selection)


def _smaller_tables(cfg: ModelConfig, ranks: int) -> ModelConfig:
    """The config with Engram tables of about 1 / ranks of their rows."""
    if ranks == 1 or not cfg.engram_layer_ids:
        return cfg
    words = max(cfg.engram_vocab_size // ranks, 2)
    primes = engram_hash.layer_primes(
        cfg.engram_layer_ids, words, cfg.engram_max_ngram_size, cfg.engram_n_heads
    )
    rows = tuple(sum(primes[layer]) for layer in cfg.engram_layer_ids)
    return dataclasses.replace(cfg, engram_vocab_size=words, engram_num_embeddings=rows)


def _setup(cfg: ModelConfig, numerics: Numerics, kernels: Any, phase: str) -> Setup:
    base = Setup(cfg, numerics=numerics, phase=phase)
    return base if kernels is None else base._replace(kernels=kernels)


def _state(cfg: ModelConfig, numerics: Numerics, slots: int, pages: int, block: int) -> Any:
    shapes = jax.eval_shape(
        functools.partial(
            states.empty, cfg, numerics, slots=slots, pages=pages, block=block, rejection=False
        )
    )
    rest = jax.tree.map(
        lambda leaf: Param(leaf.shape, leaf.dtype.name, (None,) * leaf.ndim, "zeros"), shapes
    )
    grammar = rest.grammar.replace(grammar=np.full(slots, -1, np.int32))
    return rest.replace(
        cache=drawn.cache(cfg, numerics, slots, pages // slots),
        params=sampling_state.neutral(slots),
        limit=np.full(slots, states.FOREVER, np.int32),
        grammar=grammar,
    )


def _pool(vocab: int) -> Any:
    return jax.device_get(PoolManager(vocab, cells=1 << 16).empty())
