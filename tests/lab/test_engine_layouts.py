"""`LLM.generate` under every layout file on eight simulated devices: tokens of one device."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import deepinfer_jax as dj
from converters import synthetic
from deepinfer_jax.layout import Layout
from deepinfer_jax.runtime import experts
from deepinfer_jax.runtime import model as models
from deepinfer_jax.runtime.engine import Shapes
from deepinfer_jax.runtime.eplb import Assignment
from deepinfer_jax.runtime.handover import Group
from deepinfer_jax.runtime.programs import compiled_programs
from tests.lab import small_model
from tests.lab.test_layouts import SIZES, TOLERANCE, read
from tests.runtime.runs import logprobs, same

FAST = ("tp_ep",)
# The test model without its first layer.
SHORT = {
    "num_hidden_layers": 3,
    "compress_ratios": [2, 1, 1, 0],
    "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1, 2],
    "candidate_source_layer_id": 1,
    "dspark_target_layer_ids": [1, 2],
}
LENGTHS = (5, 40, 61, 17, 33, 9, 2, 48, 20, 31)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return synthetic.write(tmp_path_factory.mktemp("layouts") / "model", small_model.hf(**SHORT))


def fresh(folder: Path, under: Layout, **options: Any) -> dj.LLM:
    """Eight slots; prompts go through in chunks of 32."""
    return dj.LLM(
        folder,
        under,
        numerics=dj.Numerics.preset("float32", cache_qdq=False),
        max_slots=8,
        max_context=128,
        shapes=Shapes(prefill=((8, 32),)),
        **options,
    )


engine = functools.cache(fresh)


def requests():
    """Ten prompts over eight slots, greedy, one of them sampled with a seed."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 500, n).tolist() for n in LENGTHS]
    greedy = dj.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    params = [dataclasses.replace(greedy, max_tokens=6 + n % 9) for n in LENGTHS]
    params[2] = dataclasses.replace(greedy, temperature=1.0, top_p=0.9, seed=7)
    return prompts, params


@functools.cache
def outcome(folder: Path, name: str):
    under = Layout.single() if name == "single" else read(name)
    return engine(folder, under).generate(*requests(), strict=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SIZES],
)
def test_generated_tokens_are_those_of_one_device(folder, name):
    """Each program is compiled once: what it returns lies as what it was given."""
    want = outcome(folder, "single")
    before = [program.variants() for program in compiled_programs()]
    same(outcome(folder, name), want, ids_only=True)
    more = [program.variants() for program in compiled_programs()]
    grown = [b - a for a, b in zip(before, more, strict=True)]
    assert grown[:2] == [1, 1] and max(grown[3:]) == 0, "prefill, decode"
    assert 1 <= grown[2] <= 2, "admit: alone, together"
    under, held = read(name), dict.fromkeys(jax.devices(), 0)
    state = jax.tree.leaves(engine(folder, under)._loop.state)
    for leaf in state:
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    ideal = sum(leaf.nbytes for leaf in state) // under.ways("slots")
    assert set(held.values()) == {ideal}, "cache and slots are divided, nothing is held twice"


def test_a_request_moves_between_shards_to_the_bit(folder):
    """`take` and `put` of random bytes: the owner's share, to another shard's slot and pages."""
    programs = engine(folder, read("tp_ep"))._loop.programs
    state = small_model.random_state(programs)
    before = jax.device_get(state)
    saved = jax.device_get(programs.take(state, 6, np.array([7, 4], np.int32)))
    state = programs.put(state, 1, np.array([2, 3], np.int32), saved)
    after = jax.device_get(state)
    paged = small_model.paged(before.cache)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        want = old.copy()
        target, source = ([2, 3], [7, 4]) if id(old) in paged else ([1], [6])
        want[target] = old[source]
        assert np.ascontiguousarray(new).tobytes() == np.ascontiguousarray(want).tobytes()
    grammar = jax.device_get(programs.grammar(state, 6))
    for old, new in zip(jax.tree.leaves(before.grammar), jax.tree.leaves(grammar), strict=True):
        np.testing.assert_array_equal(new, old[6])


def test_requests_admitted_together_enter_the_shards_of_their_slots(folder):
    """Over a state of random bytes: rows of the slots named, and nothing else; -1 is nobody's."""
    loop = engine(folder, read("tp_ep"))._loop
    state, slots = small_model.random_state(loop.programs), [6, 1, 3]
    before, rng = jax.device_get(state), np.random.default_rng(3)
    slot, params, limit, bias, *masks, grammar = loop.mover.rows((), 8)
    slot[:3] = slots
    bias = rng.normal(size=bias.shape).astype(np.float32)
    stop, seen = (rng.integers(0, 2, mask.shape).astype(np.bool_) for mask in masks)
    params, limit, grammar = jax.tree.map(
        lambda leaf: rng.integers(0, 9, leaf.shape).astype(leaf.dtype), (params, limit, grammar)
    )
    given = slot, params, limit, bias, stop, seen, grammar
    after = jax.device_get(loop.programs.admit(state, *given))
    written = [
        (before.tables.bias, bias),
        (before.tables.stop, stop),
        (before.tables.prompt, seen),
        (before.tables.output, np.zeros_like(bias, np.int32)),
        (before.length, np.zeros(8, np.int32)),
        (before.done, np.zeros(8, np.bool_)),
        (before.limit, limit),
        *zip(jax.tree.leaves(before.params), jax.tree.leaves(params), strict=True),
        *zip(jax.tree.leaves(before.grammar), jax.tree.leaves(grammar), strict=True),
    ]
    rows = {id(leaf): row for leaf, row in written}
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        want = old.copy()
        if id(old) in rows:
            want[slots] = rows[id(old)][:3]
        assert np.ascontiguousarray(new).tobytes() == np.ascontiguousarray(want).tobytes()


@pytest.mark.slow
def test_scores_captures_and_forced_routes_under_context_parallelism(folder):
    """Rows of a prompt come back in order whatever shard computed them."""
    prompts = [prompt for prompt in requests()[0] if len(prompt) > 30]
    rng = np.random.default_rng(4)
    routes = rng.permuted(np.tile(np.arange(64, dtype=np.int32), (61, 3, 1)), axis=-1)[..., :3]
    params = [
        dj.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=1),
        dj.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, forced_routes=routes),
    ]
    params = [params[number % 2] for number in range(len(prompts))]
    names = ("routes", "normed")
    one, other = (
        engine(folder, under).generate(prompts, params, capture=names, strict=True)
        for under in (Layout.single(), read("cp_ep_prefill"))
    )
    same(other, one, ids_only=True)
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        for name in names:
            for layer, rows in a.prompt_captured[name].items():
                found = b.prompt_captured[name][layer]
                np.testing.assert_allclose(found, rows, rtol=0, atol=TOLERANCE, err_msg=name)
        if number % 2:
            for layer in range(3):
                forced = np.sort(routes[: len(prompts[number]), layer], axis=-1)
                np.testing.assert_array_equal(
                    b.prompt_captured["routes"][layer], forced[: len(prompts[number])]
                )
        else:
            pairs = zip(a.prompt_logprobs, b.prompt_logprobs, strict=True)
            for token, (want, found) in zip(prompts[number], pairs, strict=True):
                assert want is found is None or abs(want[token] - found[token]) < TOLERANCE


@pytest.mark.slow
def test_experts_move_without_compiling_and_without_changing_a_bit(folder):
    """Counts of a run, replicas chosen from them and placed: the same bits, nothing compiled."""
    prompts, params = requests()
    params = [dataclasses.replace(one, logprobs=0) for one in params]
    llm = engine(folder, dataclasses.replace(read("ep"), spare_experts=8))
    with experts.recorded(llm) as counts:
        before = llm.generate(prompts, params, strict=True)
        traces = counts.traces()
        assert traces.keys() == {0, 1, 2}
        fed = sum(LENGTHS) + sum(len(out.outputs[0].token_ids) - 1 for out in before)
        assert all(
            trace.sum() >= fed * llm.model.cfg.num_experts_per_tok for trace in traces.values()
        )
        compiled = [program.variants() for program in compiled_programs()]
        for policy in ("sum_of_max", "mean"):
            chosen = experts.rebalance(llm, traces, policy)
            assert all(one.replicas().max() > 1 for one in chosen.values())
            same(llm.generate(prompts, params, strict=True), before)
    assert [program.variants() for program in compiled_programs()] == compiled


@pytest.mark.parametrize("beside", ["prefill group", "other layout", "replicas"])
def test_loops_that_share_weights_move_experts_once(beside, folder):
    """A prefill group of the same layout and devices, one of another layout, two replicas on one
    device, also after other weights came in: the same bits as before."""
    prompts, params = requests()
    work, params = prompts[:4], [dataclasses.replace(one, logprobs=0) for one in params[:4]]
    under = dataclasses.replace(Layout.single(), spare_experts=8)
    options: dict[str, Any] = {"prefill": Group(under, slots=8)}
    if beside == "other layout":
        options = {"prefill": Group(slots=8)}
    if beside == "replicas":
        options = {"replicas": 2, "devices": jax.devices()[:1] * 2}
    llm = fresh(folder, under, speculate=0, **options)
    before = llm.generate(work, params, strict=True)
    trace = np.random.default_rng(4).gamma(0.3, 20, (5, 64))
    for _ in range(2):
        held = [loop.programs.weights.layers[1].ffn.placement for loop in llm._every]
        chosen = experts.rebalance(llm, {0: trace, 1: trace[:, ::-1]})
        assert chosen[1].replicas().max() > 1
        same(llm.generate(work, params, strict=True), before)
        after = [loop.programs.weights.layers[1].ffn.placement for loop in llm._every]
        moved = [a is not b for a, b in zip(held, after, strict=True)]
        assert moved == [beside != "other layout", True]
        llm.swap_weights(folder)
        same(llm.generate(work, params, strict=True), before)


@pytest.mark.slow
def test_placement_changes_no_bit_of_the_logits(folder):
    """Any placement of any replicas, one compiled program."""
    under = dataclasses.replace(Layout.single(), spare_experts=8)
    model = dj.load(folder, under, numerics=dj.Numerics.preset("float32", cache_qdq=False))
    ids, lengths = small_model.tokens(2, 24)
    want = np.asarray(model.forward(ids, lengths).logits)
    variants = models._forward.variants()
    rng = np.random.default_rng(3)
    for _ in range(2):
        chosen = {}
        for layer in (0, 2):
            slots = np.concatenate([np.arange(64), rng.integers(0, 64, 8)])
            chosen[layer] = Assignment(rng.permutation(slots).astype(np.int32), 64, 1)
        model = dataclasses.replace(
            model, weights=experts.placed(model.setup, model.weights, chosen)
        )
        np.testing.assert_array_equal(model.forward(ids, lengths).logits, want)
    assert models._forward.variants() == variants
    plain = dj.load(folder, numerics=dj.Numerics.preset("float32", cache_qdq=False))
    np.testing.assert_array_equal(plain.forward(ids, lengths).logits, want)


def test_rebalance_refuses(folder, tmp_path):
    counts = experts.Counts(4)
    counts.add({1: np.array([[[0, 3], [3, 1]], [[2, 2], [0, 0]]])}, [(0, 2), (1, 1)])
    counts.add({1: np.array([[[0, 3], [3, 1]], [[2, 2], [0, 0]]])}, [(0, 1)])
    counts.save(tmp_path / "trace.npz")
    np.testing.assert_array_equal(
        experts.load(tmp_path / "trace.npz")[1], [[1, 1, 2, 2], [1, 0, 0, 1]]
    )
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="expected arrays layer_N, found x"):
        experts.load(tmp_path / "other.npz")
    with pytest.raises(ValueError, match="layout 'single': rebalance needs spare_experts > 0"):
        experts.rebalance(engine(folder, Layout.single()), {})


@pytest.mark.slow
def test_bounded_replay_under_context_parallelism(folder):
    """What the decoder half keeps of a prompt comes from the shards that computed it, wherever in
    a chunk the prompt ends: tokens, log-probabilities and recorded rows of one device."""
    work, params = requests()
    params = [dataclasses.replace(one, logprobs=0) for one in params]
    one, other = (
        dj.LLM(
            folder,
            under,
            numerics=dj.Numerics.preset("float32", cache_qdq=False, replay="compact"),
            max_slots=8,
            max_context=128,
            shapes=Shapes(prefill=((8, 32),)),
        ).generate(work, params, capture=("normed", "routes"), strict=True)
        for under in (Layout.single(), read("cp_ep_prefill"))
    )
    same(other, one, ids_only=True)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(logprobs(b), logprobs(a), rtol=0, atol=TOLERANCE)
        for name, layers in a.prompt_captured.items():
            for layer, rows in layers.items():
                found = b.prompt_captured[name][layer]
                np.testing.assert_allclose(found, rows, rtol=0, atol=TOLERANCE, err_msg=name)
    kept = [len(out.prompt_captured["normed"][3]) for out in one]
    assert kept == [min(n, 24) for n in LENGTHS]
