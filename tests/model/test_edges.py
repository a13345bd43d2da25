"""Boundaries and neighbours: window edges, one to three tokens, padding, empty places, captures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.runtime import model as runtime
from tests.golden.values import TINY
from tests.model.test_golden import CAPTURE, SHORT
from tests.oracle import hyper
from tests.oracle.model import Model
from tests.oracle.rules import Rules

pytestmark = pytest.mark.long
EDGES = (1, 2, 3, 4, 127, 128, 129, 256, 257)  # ratio 2, window 128, page 128


def cut(ids, lengths, width, seed):
    """One sequence cut at each length, padded with random tokens."""
    padding = np.random.default_rng(seed).integers(3, 509, (len(lengths), width))
    place = np.arange(width)
    return np.where(place < np.array(lengths)[:, None], ids[:width], padding), np.array(lengths)


@pytest.fixture(scope="module")
def edges(tiny, golden):
    """`edges(seed)`: logits of len300 cut at EDGES; the program of test_golden, other inputs."""

    def run(seed):
        tokens, lengths = cut(golden["ids.len300"], EDGES, 300, seed)
        model = tiny("float32", cache_qdq=False)
        return np.asarray(model.forward(tokens, lengths, CAPTURE).logits)

    return run


def test_every_edge_of_window_groups_and_pages(edges, golden):
    logits, want = edges(seed=1), golden["kvq_off.logits.len300"]
    for row, length in enumerate(EDGES):
        distance = np.abs(logits[row, :length] - want[:length]).max()
        assert distance < 5e-5, f"length {length}: {distance}"


def test_padding_influences_nothing(edges):
    """Other padding, and with it other neighbours, change no bit of a valid row."""
    one, two = edges(seed=1), edges(seed=2)
    assert np.isfinite(one).all() and np.isfinite(two).all()
    for row, length in enumerate(EDGES):
        np.testing.assert_array_equal(one[row, :length], two[row, :length])
        assert not np.array_equal(one[row, length:], two[row, length:]) or length == 300


def test_sequences_without_any_token_are_harmless(tiny, golden, edges):
    """A batch padded to a device count has empty sequences: all their slots are masked."""
    tokens, lengths = cut(golden["ids.len300"], EDGES, 300, 1)
    lengths[[2, 8]] = 0
    model = tiny("float32", cache_qdq=False)
    logits, found = runtime._forward(
        model.setup,
        model.weights,
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        CAPTURE,
    )
    assert np.isfinite(np.asarray(logits)).all()
    for name, layers in found.items():
        for layer, value in layers.items():
            assert np.isfinite(np.asarray(value, np.float32)).all(), f"{name} of layer {layer}"
    want = edges(seed=1)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(logits[row, :length], want[row, :length])


@pytest.mark.slow  # two programs; through the engine it is in tests/runtime/test_captures.py
def test_capture_changes_no_bit(tiny, batch):
    model = tiny("reference")
    tokens, lengths = batch(SHORT, 40)
    with_all = model.forward(tokens, lengths, CAPTURE)
    without = model.forward(tokens, lengths)
    assert not without.captured and set(with_all.captured) == set(CAPTURE)
    np.testing.assert_array_equal(with_all.logits, without.logits)


def test_capture_names(tiny, batch):
    with pytest.raises(ValueError, match="capture: unknown name 'route'; expected after_engram,"):
        tiny("reference").forward(*batch(SHORT, 40), ("route",))


def departs(golden, name, change):
    """Largest logit difference to the golden values after a deliberate mistake."""
    model = Model(TINY, golden["engram.token_map"], Rules())
    change(model)
    ids = golden[f"ids.{name}"]
    return np.abs(model.run(ids).logits - golden[f"kvq_off.logits.{name}"]).max()


def test_the_golden_data_would_show_these_mistakes(golden, monkeypatch):
    """Swapped rotary bases, YaRN left out, comb transposed, sinks lost: all far above 5e-5."""

    def swapped(model):
        cfg = model.store.config
        cfg["rope_theta"], cfg["compress_rope_theta"] = cfg["compress_rope_theta"], 10000

    def no_yarn(model):
        model.store.config["rope_scaling"] = {**model.store.config["rope_scaling"], "factor": 1}

    def no_sinks(model):
        for name, (dtype, raw) in model.store.stored.items():
            if name.endswith("attn_sink"):
                model.store.stored[name] = dtype, np.full_like(raw, 0)

    assert departs(golden, "len7", lambda model: None) < 2e-5
    for change in (swapped, no_yarn, no_sinks):
        assert departs(golden, "len40", change) > 0.1, change.__name__
    plain = hyper.sinkhorn
    monkeypatch.setattr(hyper, "sinkhorn", lambda *args: plain(*args).T)
    assert departs(golden, "len7", lambda model: None) > 0.1, "comb transposed"


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_invariant_rows(compute, tmp_path):
    """With `invariant` a row's bits depend neither on the batch nor on the padded length."""
    import deepinfer_jax as dj
    from deepinfer_jax.config import Numerics
    from tests.model import drawn

    one = drawn.draw("3", tmp_path)
    numerics = Numerics.preset("reference", compute=compute, invariant=True)
    model = dj.load(one.folder, numerics=numerics)
    ids = one.ids[:30]
    alone = np.asarray(model.forward(ids[None, :30]).logits)[0]
    tokens, lengths = cut(one.ids, (30, 17, 48), 48, seed=3)
    tokens[1] = np.roll(tokens[1], 5)
    several = np.asarray(model.forward(tokens, lengths).logits)
    np.testing.assert_array_equal(several[0, :30], alone)
    draft, drafts = model.draft(ids[None, :30]), jax.device_get(model.draft(tokens, lengths))
    for got, want in zip(drafts, draft, strict=True):
        np.testing.assert_array_equal(got[0], want[0])
