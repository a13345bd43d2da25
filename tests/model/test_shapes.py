"""Other sizes than the golden ones: random checkpoints load, convert and equal a transcription.

Each drawn checkpoint is run as one ragged batch cut around the window's edge; by causality every
cut must equal the head of the one sequence that the numpy transcription computed.
"""

import jax
import numpy as np
import pytest

import deepinfer_jax as dj
from converters import from_hf
from deepinfer_jax.config import Numerics
from deepinfer_jax.model.capture import NAMES
from tests.model import drawn
from tests.model.test_golden import MECHANISMS

FAST = ("8",)
pytestmark = pytest.mark.long
FLOAT32 = Numerics.preset("float32", cache_qdq=False)
CAPTURE = tuple(sorted(NAMES))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in drawn.CASES
    ],
)
def case(request, tmp_path_factory):
    """(drawn case, transcription, its values, our output for the ragged batch)."""
    one = drawn.draw(request.param, tmp_path_factory.mktemp("drawn"))
    plain, run = one.expected()
    # Below this a correct float32 evaluation may choose otherwise: draw other numbers.
    assert run.margin > 1e-6, f"a selection is decided by {run.margin} standard deviations"
    model = dj.load(one.folder, numerics=FLOAT32)
    out = jax.device_get(model.forward(*one.ragged(seed=0), CAPTURE))
    return one, plain, run, model, out


def test_every_mechanism(case):
    """In computation order on the whole sequence; the first to depart is named."""
    one, _, run, model, out = case
    length = len(one.ids)
    for layer in range(model.cfg.num_hidden_layers + 1):
        for name, mechanism in {"engram_rows": "Engram hashing", **MECHANISMS}.items():
            if layer in run.found.get(name, {}):
                want = run.found[name][layer]
                got = out.captured[name][layer][-1, : min(length, len(want))]
                limit = 5e-5 * max(1, np.abs(want).max(initial=0))
                assert np.abs(got - want).max(initial=0) < limit, f"{mechanism} of layer {layer}"
        for name in ("routes", "index_topk"):
            if layer in run.found.get(name, {}):
                rows = out.captured[name][layer][-1], run.found[name][layer]
                for got, want in zip(*rows, strict=True):
                    assert got[got >= 0].tolist() == list(want), f"{name} of layer {layer}"


def test_logits_of_every_cut(case):
    one, _, run, _, out = case
    assert np.isfinite(out.logits).all()
    for row, length in enumerate(one.lengths):
        distance = np.abs(out.logits[row, :length] - run.logits[:length]).max()
        assert distance < 5e-5, f"length {length}: {distance}"
    assert run.logits.std() > 0.1


def test_drafts(case):
    one, plain, run, model, _ = case
    if not model.cfg.has_draft:
        with pytest.raises(ValueError, match="no DSpark drafter"):
            model.draft(one.ids[None])
        return
    out = jax.device_get(model.draft(*one.ragged(seed=0)))
    for row, length in enumerate(one.lengths):
        want = one.expected_draft(plain, run, length)
        assert out.token_ids[row].tolist() == want.ids, f"length {length}"
        np.testing.assert_allclose(out.logits[row], want.logits, rtol=0, atol=5e-5)
        np.testing.assert_allclose(out.confidence[row], want.confidence, rtol=0, atol=5e-5)


def test_converted_folder_and_padding_change_no_bit(case, tmp_path):
    """The same bits from a converted folder, with other tokens as padding."""
    one, _, _, model, out = case
    converted = from_hf.convert(one.folder, tmp_path / "converted", quiet=True)
    again = dj.load(converted, numerics=FLOAT32)
    assert again.cfg == model.cfg
    tokens, lengths = one.ragged(seed=1)
    logits = np.asarray(again.forward(tokens, lengths, CAPTURE).logits)
    for row, length in enumerate(one.lengths):
        np.testing.assert_array_equal(logits[row, :length], out.logits[row, :length])
