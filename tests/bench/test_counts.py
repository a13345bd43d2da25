"""FLOP and bytes of a step: by hand, against counts over traced and compiled programs."""

import dataclasses

import pytest

from deepinfer_jax import shipped, spec
from deepinfer_jax.bench import counts, slices
from deepinfer_jax.bench.counts import Rows
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.lab import hlo, kernels, program
from tests.bench import counting

RELEASED = ModelConfig.from_json(shipped.find("models", "v41-flash"))
DECODE = (Rows(16, 1, 1023), Rows(16, 3, 1021), Rows(16, 6, 1018))
PREFILL = Rows(2, 512)
# window; with Engram; source of ratio 2; its reuse; source of ratio 1 with the pool; reuse; reindex
KINDS = (0, 1, 2, 3, 20, 21, 24)

# The released width with six layers: two windows (Engram in one), two halves, one reindex.
SHORT = dataclasses.replace(
    RELEASED,
    num_hidden_layers=6,
    compress_ratios=(0, 0, 2, 1, 1, 1, 0, 0, 0),
    kv_source_layer_ids=(2, 3),
    index_source_layer_ids=(2, 3, 5),
    candidate_source_layer_id=3,
    engram_layer_ids=(1,),
    engram_num_embeddings=RELEASED.engram_num_embeddings[:1],
    dspark_target_layer_ids=(3, 4, 5),
)


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def arguments(one: slices.Slice) -> tuple:
    return tuple(spec.abstract(tree) for tree in (one.weights, one.carry, one.given))


def test_one_routed_expert_by_hand() -> None:
    """35.4 M weights, 18.8 MB: the released expert."""
    one = 5120 * 2304 * 3
    work = counts.moe(RELEASED, rows=1, experts=384, chosen=6)
    assert work.flop["experts"] == 2 * 6 * one
    assert work.flop["shared expert"] == 2 * one
    assert work.flop["router"] == 2 * 5120 * 384
    assert work.bytes["experts"] == pytest.approx(6 * one * (0.5 + 1 / 32), rel=0.01)
    rank = counts.moe(RELEASED, rows=256, experts=384, chosen=6, ranks=64)
    assert rank.flop["experts"] == 256 * work.flop["experts"]
    assert rank.bytes["experts"] == pytest.approx(6 * one * (0.5 + 1 / 32))


def test_a_reuse_layer_by_hand() -> None:
    """Layer 21, one row at position 8191: 128 window keys and 512 selected of 8192."""
    work = counts.decode(RELEASED, Rows(1, 1, 8191), layers=[21])
    low, out = 5120 * 1280 + 1280 * 64 * 512 + 5120 * 512, 64 * 512 * 1024 + 8 * 1024 * 5120
    assert work.flop["attention"] == 2 * (low + out)
    assert work.flop["attention core"] == 4 * 64 * 512 * (128 + 512)
    assert work.flop["mHC"] == 2 * 2 * (8 + 16) * 4 * 5120
    assert work.bytes["entries"] == 512 * (256 + 32) and work.bytes["window"] == 127 * 528
    assert work.bytes["written"] == 528
    assert "index scores" not in work.flop and "compressor" not in work.flop


def test_a_source_layer_by_hand() -> None:
    """Layer 2, ratio 2, two sequences of 300 tokens: 150 entries each, all scored by the last."""
    work = counts.decode(RELEASED, Rows(2, 1, 299), layers=[2])
    assert work.flop["index scores"] == 2 * 2 * 150 * 32 * 128
    assert work.flop["indexer"] == 2 * 2 * (1280 * 32 * 128 + 5120 * 32)
    assert work.flop["compressor"] == 2 * 2 * (2 * 5120 * 512 + 512 * 128)
    assert work.flop["attention core"] == 2 * 4 * 64 * 512 * (128 + 150)
    assert work.bytes["index keys"] == 2 * 150 * (64 + 4)
    assert work.bytes["written"] == 2 * (528 + (288 + 68) / 2)


@pytest.mark.parametrize(("context", "giga"), [(8 << 10, 35.8), (128 << 10, 38.6), (1 << 20, 57.4)])
def test_a_decode_row_as_the_public_arithmetic_has_it(context: int, giga: float) -> None:
    """16.09 G weights a token, attention 3.2 GFLOP, indexer 0.4, 3.2 or 22.0."""
    work = counts.decode(RELEASED, Rows(1, 1, context - 1))
    scores = work.flop["index scores"]
    assert work.flop["attention core"] == pytest.approx(3.2e9, rel=0.01)
    assert (work.flops - scores - work.flop["attention core"]) / 2 == pytest.approx(
        16.09e9, rel=0.005
    )
    assert work.flops == pytest.approx(giga * 1e9, rel=0.005)
    reads = work.bytes["window"] + work.bytes["entries"]
    assert reads == pytest.approx(8.3e6, rel=0.01), "KV read by one decode row"


@pytest.mark.parametrize(("context", "mega"), [(8 << 10, 3.6), (128 << 10, 26.7), (1 << 20, 183)])
def test_index_keys_of_a_sequence(context: int, mega: float) -> None:
    work = counts.decode(RELEASED, Rows(1, 1, context - 1))
    assert work.bytes["index keys"] == pytest.approx(mega * 1e6, rel=0.01)


def test_prefill_is_the_sum_of_its_causal_rows() -> None:
    rows = Rows(2, 300)
    whole = counts.prefill(RELEASED, rows, layers=[2, 3, 20, 24])
    alone = counts.total(
        counts.decode(RELEASED, Rows(2, 1, p), layers=[2, 3, 20, 24]) for p in range(300)
    )
    for part, flop in whole.flop.items():
        assert flop == pytest.approx(alone.flop[part]), part


def test_compact_replay_halves_a_prompt() -> None:
    """7.88 G weights a token, of which the decoder half has the KV source alone."""
    full = counts.prefill(RELEASED, Rows(1, 8192))
    half = counts.prefill(RELEASED, Rows(1, 8192), replay="compact")
    scores = half.flop["index scores"] + half.flop["attention core"]
    few = counts.prefill(RELEASED, Rows(1, 136)).flops / 2
    assert (half.flops - scores - few) / 8192 / 2 == pytest.approx(7.88e9, rel=0.01)
    assert 0.49 < half.flops / full.flops < 0.53
    short = Rows(3, 100)
    assert counts.prefill(RELEASED, short, replay="compact") == counts.prefill(RELEASED, short)


def test_tokens_of_an_acceptance_profile() -> None:
    assert counts.accepted([]) == 1
    assert counts.accepted([0.8, 0.5]) == pytest.approx(1 + 0.8 + 0.4)
    with pytest.raises(ValueError, match="1.5"):
        counts.accepted([0.5, 1.5])


@pytest.mark.parametrize("rows", [*DECODE, PREFILL], ids=str)
@pytest.mark.parametrize("layer", KINDS)
def test_the_formula_against_the_traced_layer(layer: int, rows: Rows) -> None:
    one = slices.layers(RELEASED, [layer], Numerics(), rows)
    found = counting.traced(one.turn, *arguments(one))
    # Fewer than 64 (row, head) pairs are padded to 64 by the indexer's reference.
    assert one.executed.flops == pytest.approx(found, rel=0.01)
    assert one.needed.flops <= one.executed.flops * (1 + 1e-9)


@pytest.mark.parametrize("rows", [DECODE[0], slow(PREFILL)], ids=str)
def test_weight_bytes_against_the_traced_layers(rows: Rows) -> None:
    one = slices.layers(RELEASED, KINDS, Numerics(), rows)
    work = program.measure(one.turn, arguments(one), kernels.Costs())
    read = sum(size for path, size in work.touched.items() if path.startswith("0/"))
    listed = ("weights", "experts", "engram rows")
    # Norms, biases and sinks are not in the formula.
    assert sum(one.needed.bytes[part] for part in listed) == pytest.approx(read, rel=0.002)


@pytest.mark.parametrize(
    "rows", [Rows(2, 1, (128 << 10) - 1), Rows(2, 6, (128 << 10) - 6)], ids=str
)
@pytest.mark.parametrize(("layer", "whole"), [(20, True), (24, False)])
def test_index_scores_are_priced_as_they_are_counted(layer: int, whole: bool, rows: Rows) -> None:
    """The source of the candidate pool scores the whole context, later index layers the pool."""
    one = slices.layers(RELEASED, [layer], Numerics(), rows)
    costs = kernels.Costs()
    program.measure(one.turn, arguments(one), costs)
    (found,) = (cost for cost in costs.found if cost.name == "index_topk.select")
    values, scales = found.read[2:4]
    scored = rows.count * (128 << 10 if whole else 2048 * 8)
    assert sum(found.flop.values()) == 2.0 * scored * 32 * 128
    # A causal row sees up to five entries less than the last one.
    assert sum(found.flop.values()) == pytest.approx(one.needed.flop["index scores"], rel=1e-4)
    assert values + scales == pytest.approx(one.needed.bytes["index keys"])


@pytest.mark.parametrize("layers", [6, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "phase", ["decode 6", "compact", *(slow(name) for name in ("decode 1", "decode 3", "full"))]
)
def test_the_formula_against_the_traced_step(phase: str, layers: int) -> None:
    """Whole programs of the engine with a rank's share, drafter and head included."""
    kind, _, width = phase.partition(" ")
    if kind == "decode":
        rows, numerics = Rows(64, int(width), 4096 - int(width)), Numerics()
    else:
        rows, numerics = Rows(2, 2048), Numerics(replay=kind)
    name = "decode" if kind == "decode" else "prefill"
    cfg = RELEASED if layers == 40 else SHORT
    one = slices.rank(cfg, 64, numerics, name, rows, draft=width != "1")
    found = counting.traced(one.turn, *arguments(one))
    assert one.executed.flops == pytest.approx(found, rel=0.03)
    if layers == 40:
        assert one.needed.flops == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(
    ("layer", "rows"),
    [(20, DECODE[2])] + [slow(layer, rows) for layer in KINDS for rows in (*DECODE, PREFILL)],
    ids=str,
)
def test_the_formula_against_the_compiled_layer(layer: int, rows: Rows) -> None:
    one = slices.layers(RELEASED, [layer], Numerics(), rows)
    found = counting.compiled(one.turn, *arguments(one))
    assert one.executed.flops == pytest.approx(found, rel=0.03)


def test_products_of_compiled_text() -> None:
    text = """
%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %w = f32[8,8]{1,0} constant({...})
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %d = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %d)
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %w = (s32[], f32[4,8]{1,0}) while(%a), condition=%c, body=%body, TRIPS
  ROOT %r = f32[4,8]{1,0} get-tuple-element(%w), index=1
}
"""
    text = text.replace("TRIPS", 'backend_config={"known_trip_count":{"n":"5"}}')
    assert hlo.products(text) == 5 * 2 * 4 * 8 * 8
    library = text.replace(
        "dot(%x, %w)", 'custom-call(%x, %w), custom_call_target="__onednn$matmul"'
    )
    with pytest.raises(ValueError, match="library"):
        hlo.products(library)
