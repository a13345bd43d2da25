"""Parity with other implementations on the tiny golden checkpoint (golden/PROVENANCE.md).

Sequences are run right-padded in a few batches, so that each case is a ragged batch too and few
programs are compiled. Float32 without cache quantisation is compared value by value, mechanism by
mechanism. With quantisation a value within rounding noise of a step may take the other step, after
which an untrained model of this size goes its own way; `test_layers.py` therefore also compares
every layer on equal inputs.
"""

import jax
import numpy as np
import pytest

from deepinfer_jax.model.capture import NAMES
from tests.golden.values import TINY
from tests.oracle.model import Model
from tests.oracle.rules import Rules

RAGGED = ("len7", "len40", "len129")
SHORT = ("len1", "len7", "text", "len40", "eos_mid")
LONG = ("len129", "len200", "len300", "repeat")
CAPTURE = tuple(sorted(NAMES))

# Computation order within a layer; the first to depart names the mechanism.
MECHANISMS = {
    "streams": "streams",
    "after_engram": "Engram",
    "attn_in": "mHC collapse and norm",
    "compressed_kv": "compressor",
    "index_keys": "index keys",
    "attn_out": "attention",
    "ffn_in": "mHC write-back",
    "ffn_out": "experts",
    "pre_mix": "mHC mixes",
}


@pytest.fixture(scope="module")
def forward(tiny, batch):
    """`forward(names, width, preset, ...)`: name -> (logits, captured values), run once each."""
    done = {}

    def run(names, width, preset, **fields):
        key = names, preset, *sorted(fields.items())
        if key not in done:
            tokens, lengths = batch(names, width)
            out = jax.device_get(tiny(preset, **fields).forward(tokens, lengths, CAPTURE))
            done[key] = {
                name: (out.logits[i, :n], {k: _row(v, i, n) for k, v in out.captured.items()})
                for i, (name, n) in enumerate(zip(names, lengths, strict=True))
            }
        return done[key]

    return run


def _row(layers, i, n):
    return {layer: value[i][:n] for layer, value in layers.items()}


def float32(forward, *, cache_qdq):
    return forward(SHORT + LONG, 300, "float32", cache_qdq=cache_qdq)


def distance(logits, want):
    """Largest logit difference at each position."""
    return np.abs(logits - want).max(-1)


def sets(entries):
    """Rows of ids with -1 for none, as sorted lists."""
    return [sorted(int(e) for e in row if e >= 0) for row in np.asarray(entries)]


def test_logits_without_cache_quantisation(forward, golden):
    worst = {
        name: distance(logits, golden[f"kvq_off.logits.{name}"]).max()
        for name, (logits, _) in float32(forward, cache_qdq=False).items()
    }
    print({name: f"{value:.1e}" for name, value in worst.items()})
    assert len(worst) == 9
    assert max(worst.values()) < 5e-5, worst


def test_ragged_batch(forward, golden):
    """The producer's own padded batch, at the last real position."""
    results = float32(forward, cache_qdq=False)
    for name in RAGGED:
        want = golden[f"kvq_off.ragged_last_logits.{name}"]
        np.testing.assert_allclose(results[name][0][-1], want, rtol=0, atol=5e-5, err_msg=name)


def test_every_mechanism(forward, golden):
    """Intermediates of one sequence in the order they are computed."""
    _, found = float32(forward, cache_qdq=False)["len40"]
    compared = 0
    for layer in range(10):
        for name, mechanism in MECHANISMS.items():
            want = golden.get(f"kvq_off.{name}.len40.layer{layer}")
            if name == "streams":
                want = golden["kvq_off.streams.len40"][layer]
            if want is None:
                continue
            got = found[name][layer][: len(want)]
            assert np.abs(got - want).max() < 5e-5, f"{mechanism} of layer {layer} ({name})"
            compared += 1
        if layer == 0:
            ids, weights = found["routes"][0], found["route_weights"][0]
            order = np.argsort(golden["kvq_off.route_ids.len40"][0], axis=-1)
            want = np.take_along_axis(golden["kvq_off.route_weights.len40"][0], order, axis=-1)
            assert (ids[:, 0] < ids[:, 1]).all()
            np.testing.assert_allclose(weights, want, rtol=0, atol=1e-5, err_msg="router")
    assert compared == 10 * 6 + 2 + 2 * 3
    for name, key in (("collapsed", "final_collapsed"), ("normed", "final_normed")):
        want = golden[f"kvq_off.{key}.len40"]
        assert np.abs(found[name][10] - want).max() < 5e-5, f"head input ({name})"
    taps = np.concatenate([found["taps"][layer] for layer in (7, 8, 9)], axis=-1)
    assert np.abs(taps - golden["kvq_off.main_hidden.len40"]).max() < 5e-5, "drafter taps"


def test_engram_rows_are_exact(forward, golden):
    for name, (_, found) in float32(forward, cache_qdq=False).items():
        got = np.stack([found["engram_rows"][layer] for layer in (1, 4)], axis=1)
        np.testing.assert_array_equal(got, golden[f"engram_hash.{name}"], err_msg=name)


def test_routes_and_selections_are_equal(forward, golden):
    """As sets: experts of every layer, entries of every index source, visible candidates."""
    for name, (_, found) in float32(forward, cache_qdq=False).items():
        for layer in range(10):
            want = sets(golden[f"kvq_off.route_ids.{name}"][layer])
            assert sets(found["routes"][layer]) == want, f"router of layer {layer}, {name}"
        for layer in (2, 4, 6, 8):
            want = sets(golden[f"kvq_off.index_topk.{name}.layer{layer}"])
            assert sets(found["index_topk"][layer]) == want, f"indexer of layer {layer}, {name}"
        mask = golden[f"kvq_off.candidates.{name}.layer6"] > 0
        got = np.repeat(found["candidates"][6], 8, axis=-1)[:, : mask.shape[1]]
        seen = np.tri(*mask.shape, dtype=bool)
        np.testing.assert_array_equal(got & seen, mask & seen, err_msg=f"candidate pool, {name}")


def agreeing(results, want, prefix) -> dict[str, float]:
    """Share of positions within 2e-3 for each sequence that `want` holds."""
    shares = {}
    for name, (logits, _) in results.items():
        key = f"{prefix}.logits.{name}"
        if key in want:
            shares[name] = float((distance(logits, want[key]) < 2e-3).mean())
            assert cosines(logits, want[key]).mean() > 0.999, name
    print(prefix, {name: round(share, 3) for name, share in shares.items()})
    return shares


def cosines(a, b):
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def test_logits_with_cache_quantisation(forward, golden, official):
    """95% of positions within 2e-3, for all sequences but at most one: `len300` departs in exact
    float64 arithmetic too (0.92 of its positions are within 2e-3 in tests/oracle)."""
    results = float32(forward, cache_qdq=True)
    shares = agreeing(results, golden, "kvq_on")
    assert len(shares) == 9 and sum(share < 0.95 for share in shares.values()) <= 1, shares
    shares = agreeing(results, official, "f32")
    assert len(shares) == 3 and min(shares.values()) >= 0.95, shares
    # Where no step was taken differently nothing but float32 noise is left.
    quiet = [
        name
        for name, (logits, _) in results.items()
        if distance(logits, golden[f"kvq_on.logits.{name}"]).max() < 5e-5
    ]
    assert len(quiet) >= 4, quiet


@pytest.mark.slow
def test_logits_with_activation_quantisation(forward, official):
    results = forward(RAGGED, 129, "float32", act_quant=True)
    shares = agreeing(results, official, "f32a")
    assert len(shares) == 3 and min(shares.values()) >= 0.95, shares
    worst = {n: distance(v[0], official[f"f32a.logits.{n}"]).max() for n, v in results.items()}
    print({name: f"{value:.1e}" for name, value in worst.items()})
    assert sorted(worst.values())[1] < 5e-5, worst


@pytest.mark.parametrize(
    ("mixing", "names"),
    [(np.float64, ("len1", "len40")), (np.float32, ("len1", "len7", "text"))],
    ids=["float64", "float32"],
)
def test_rounding_points_are_the_released_ones(mixing, names, golden, official):
    """The transcription equals the released bfloat16 code at every position of these prompts, each
    under one of two orders of mHC's float32 sums: no rounding is missing and none is too many."""
    rules = Rules(act_quant=True, cache_qdq=True, half=True, mixing=mixing)
    model = Model(TINY, golden["engram.token_map"], rules)
    for name in names:
        logits = model.run(golden[f"ids.{name}"]).logits
        assert distance(logits, official[f"bf16.logits.{name}"]).max() < 5e-6, name


# Argmax agreement with the released bfloat16 code, the lowest of evaluations that round where it
# does and only sum in another order: the two that the producer measured (PROVENANCE.md) and the
# transcription with float64 or float32 rotary angles and mHC sums, rounded down.
NOISE_FLOOR = {
    "len1": 1.0,
    "len7": 0.85,
    "text": 0.88,
    "len40": 0.95,
    "eos_mid": 0.85,
    "len129": 0.88,
    "repeat": 0.88,
    "len200": 0.84,
    "len300": 0.75,
}


def test_released_numerics(forward, official):
    """bfloat16 with all quantisers: equal to the bit until a first rounding falls the other way,
    then by cosine and argmax."""
    results = {
        **forward(SHORT, 40, "reference"),
        **forward(LONG, 300, "reference"),
    }
    exact = 0
    for name, floor in NOISE_FLOOR.items():
        logits, want = results[name][0], official[f"bf16.logits.{name}"]
        cosine = cosines(logits, want).mean()
        agree = (logits.argmax(-1) == want.argmax(-1)).mean()
        equal = distance(logits, want) < 1e-5
        first = int(np.argmin(equal)) if not equal.all() else len(equal)
        print(f"{name}: cosine {cosine:.4f}, argmax {agree:.3f}, first {first} positions equal")
        assert cosine >= 0.99, name
        assert agree >= floor, name
        exact += first
    # Float64 sums: 77 positions before the first departures.
    assert exact >= 50


def drafted(model, batch, names, width):
    out = jax.device_get(model.draft(*batch(names, width)))
    return {name: [part[i] for part in out] for i, name in enumerate(names)}


@pytest.mark.parametrize("cache_qdq", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_drafts(tiny, batch, golden, official, cache_qdq):
    """Ids, logits and confidences after each prompt.

    With cache quantisation the two producers are 2e-2 apart on len40 (one step taken differently);
    being equal to either will do. On text and eos_mid the float64 transcription is 1e-4 and 3e-3
    from both: steps that no correct program is bound to take the same way.
    """
    prefix = "kvq_on" if cache_qdq else "kvq_off"
    names = ("len7", "len40", "text", "eos_mid")
    worst = []
    for name, got in drafted(tiny("float32", cache_qdq=cache_qdq), batch, names, 40).items():
        known = []
        if f"{prefix}.dspark.ids.{name}" in golden:
            parts = [golden[f"{prefix}.dspark.{p}.{name}"] for p in ("ids", "logits", "confidence")]
            known.append([parts[0][1:], *parts[1:]])
        if cache_qdq:
            known.append(released_draft(official, "f32", name))
        assert all(got[0].tolist() == one[0].tolist() for one in known), name
        off = [max(np.abs(a - b).max() for a, b in zip(got, one, strict=True)) for one in known]
        worst += [min(off)] if off else []
    print(prefix, [f"{distance:.1e}" for distance in worst])
    assert len(worst) == 4
    if cache_qdq:
        assert sorted(worst)[1] < 5e-5 and max(worst) < 2e-2, worst
    else:
        assert max(worst) < 5e-5, worst


def released_draft(official, prefix, name):
    """ids, logits, confidence of the released code right after the prompt."""
    mode = "ownerkeys" if f"{prefix}.ownerkeys.draft_ids.{name}" in official else "released"
    return (
        official[f"{prefix}.{mode}.draft_ids.{name}"][0, 1:],
        official[f"{prefix}.draft_logits0.{name}"],
        official[f"{prefix}.{mode}.draft_confidence.{name}"][0],
    )


@pytest.mark.slow
def test_drafts_with_activation_quantisation(tiny, batch, official):
    for name, got in drafted(tiny("float32", act_quant=True), batch, RAGGED, 129).items():
        ids, logits, confidence = released_draft(official, "f32a", name)
        assert got[0].tolist() == ids.tolist(), name
        np.testing.assert_allclose(got[1], logits, rtol=0, atol=2e-3, err_msg=name)
        np.testing.assert_allclose(got[2], confidence, rtol=0, atol=2e-3, err_msg=name)


@pytest.mark.slow
def test_released_drafts(tiny, batch, official):
    """bfloat16. A block drafted after another token is another block: prompts whose last argmax is
    not the released one (a near tie) are left out, and few may be."""
    names = (*SHORT[1:], "len129")
    model = tiny("reference")
    tokens, lengths = batch(names, 129)
    logits = jax.device_get(model.forward(tokens, lengths).logits)
    compared = []
    for i, (name, got) in enumerate(drafted(model, batch, names, 129).items()):
        anchor = logits[i, lengths[i] - 1].argmax()
        if anchor != official[f"bf16.logits.{name}"][-1].argmax():
            continue
        ids, want, _ = released_draft(official, "bf16", name)
        print(f"{name}: cosine {cosines(got[1], want).mean():.4f}")
        assert cosines(got[1], want).mean() > 0.99, name
        assert got[0].tolist() == ids.tolist(), name
        compared.append(name)
    assert len(compared) >= len(names) - 1, compared
