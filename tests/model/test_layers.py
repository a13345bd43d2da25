"""Every layer on the transcription's own inputs, under the quantised numerics (tests/oracle).

End to end, one value that takes another quantisation step changes all that follows. Here each layer
gets the streams and mixes that the float64 transcription has at its entry, so a difference stays in
its layer (and in the layers that read its compressed entries), and the share of equal rows says
that every rounding point is where the released code has it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model import engram, hyper, transformer
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.compile import jit
from tests.golden.values import TINY
from tests.oracle.model import Model
from tests.oracle.rules import Rules

ROWS = ("after_engram", "attn_in", "attn_out", "ffn_in", "ffn_out", "pre_mix")
ENTRIES = ("compressed_kv", "index_keys")


def layer_by_layer(setup, weights, tokens, streams, pre, table_rows):
    """What every layer makes of streams[layer], pre[layer]."""
    recorder = Capture((*ROWS, *ENTRIES, "routes", "index_topk"))
    lengths = jnp.full((1,), tokens.shape[1], jnp.int32)
    rows, cache = transformer.whole_sequences(setup, tokens, lengths, ring=0)
    selection, after = None, []
    for plan, layer in zip(setup.cfg.plan, weights.layers, strict=True):
        hidden = hyper.hidden(streams[plan.index], pre[plan.index])
        if plan.engram:
            added = engram.engram(setup, layer.engram, table_rows[plan.index], hidden.streams)
            recorder.add("after_engram", plan.index, added)
            hidden = hyper.hidden(added, hidden.pre)
        hidden, (cache, selection) = transformer._layer(
            setup, plan, layer, hidden, rows, cache, selection, recorder, produced=False
        )
        after.append(hidden.streams)
    return recorder.found, after


@pytest.fixture(
    scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "reference"]
)
def both(request, tiny, golden):
    """(preset, transcription's values, our values)."""
    ids = golden["ids.len129"]
    half = request.param == "reference"
    rules = Rules(act_quant=half, cache_qdq=True, half=half)
    want = Model(TINY, golden["engram.token_map"], rules).run(ids)
    model = tiny(request.param)
    depth = model.cfg.num_hidden_layers
    streams = [want.found["streams"][layer] for layer in range(depth)]
    first = np.eye(model.cfg.hc_mult)[np.zeros(len(ids), int)]
    pre = [first] + [want.found["pre_mix"][layer] for layer in range(depth - 1)]
    got, after = jit(layer_by_layer, static_argnums=0)(
        model.setup,
        model.weights,
        jnp.asarray(ids, jnp.int32)[None],
        [jnp.asarray(x, model.setup.dtype) for x in streams],
        [jnp.asarray(x, jnp.float32) for x in pre],
        {k: jnp.asarray(v, jnp.int32) for k, v in want.found["engram_rows"].items()},
    )
    found = jax.tree.map(lambda leaf: np.asarray(leaf.astype(jnp.float32), np.float64), got)
    found["after"] = {
        layer: np.asarray(x.astype(jnp.float32), np.float64) for layer, x in enumerate(after)
    }
    want.found["after"] = {k - 1: v for k, v in want.found["streams"].items() if k}
    return request.param, want.found, found


def test_rows_are_equal(both):
    """float32: within 1e-5; bfloat16: to the bit (pre_mix and route weights are float32)."""
    preset, want, got = both
    share, worst = {}, {}
    for name in (*ROWS, "after"):
        limit = 1e-5 if preset == "float32" or name == "pre_mix" else 0
        off = [np.abs(got[name][k] - v).reshape(len(v), -1).max(-1) for k, v in want[name].items()]
        share[name] = float((np.concatenate(off) <= limit).mean())
        worst[name] = float(np.concatenate(off).max())
    print(preset, {n: f"{share[n]:.4f} (worst {worst[n]:.1e})" for n in share})
    assert min(share.values()) > (0.99 if preset == "float32" else 0.95), share


def test_stored_codes_are_equal(both):
    preset, want, got = both
    for name in ENTRIES:
        equal = [got[name][k][0, : len(v)] == v for k, v in want[name].items()]
        share = np.mean([part.mean() for part in equal])
        print(preset, name, f"{share:.6f}")
        assert share > 0.999, name


def test_choices_are_equal(both):
    preset, want, got = both
    for name, least in (("routes", 0.999), ("index_topk", 0.98)):
        same = [
            sorted(int(e) for e in a if e >= 0) == sorted(int(e) for e in b)
            for k, rows in want[name].items()
            for a, b in zip(got[name][k], rows, strict=True)
        ]
        print(preset, name, f"{np.mean(same):.5f}")
        assert np.mean(same) >= least, name
