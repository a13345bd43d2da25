"""Rings of the trained demo rebuilt by bounded replay: how far log-probabilities move.

A row's window holds rows that saw windows: through L layers of window w it depends on the L (w - 1)
tokens before it, 378 of the demo. Replay of fewer tokens cuts that off.
"""

import pytest

import deepinfer_jax as dj
from deepinfer_jax.demo.made_text import Writer
from deepinfer_jax.runtime.engine import Shapes
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from tests.runtime.runs import measured


@pytest.mark.slow
@pytest.mark.parametrize(("replay", "most"), [(64, 1e-2), (128, 1e-4)])
def test_measured_difference(replay, most):
    """most: 3.2e-3 and 6.7e-6 were measured."""

    def engine(cache: PrefixPolicy | bool) -> dj.LLM:
        num = dj.Numerics.preset("float32", cache_qdq=False, invariant=True)
        shapes = Shapes(prefill=((2, 64),))
        options = {"max_slots": 4, "max_context": 1024, "speculate": 0, "shapes": shapes}
        return dj.LLM(numerics=num, prefix_cache=cache, **options)

    exact = engine(False)
    other = engine(PrefixPolicy(restore="replay", states=0, replay=replay))
    writer, text = Writer(77), ""  # unseen in training
    while len(ids := exact.tokenizer.encode(text)) < 760:
        text += writer.story() + "\n"
    work = [ids[:600] + ids[start:end] for start, end in ((600, 640), (640, 657), (657, 717))]
    found = measured(exact, other, work, replay=replay, ends=(512, 512, 640))
    assert 0 < found.worst <= most
    assert found.alike == [24] * 3
