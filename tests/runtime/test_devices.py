"""Engines on devices of choice: everything of theirs is there, two of them work at once."""

import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import deepinfer_jax as dj
from deepinfer_jax.layout import Layout
from deepinfer_jax.runtime import groups
from tests.runtime import small_model
from tests.runtime.runs import same

RULES = tuple((logical, ("data",)) for logical in ("rows", "slots", "pages"))
PAIR = Layout("pair", (("data", 2),), RULES)


def used() -> dict[int, set[jax.Device]]:
    """The devices of every array that is alive."""
    gc.collect()
    return {id(array): array.sharding.device_set for array in jax.live_arrays()}


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Nothing is copied between devices unless asked for, in any thread: an engine has its own."""
    name = "jax_transfer_guard_device_to_device"
    before = getattr(jax.config, name)
    jax.config.update(name, "disallow")
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_engines_work_at_once_each_on_its_device(folder, prompts):
    """Their requests in turns, after one read of the checkpoint: the bits of each one alone.
    Nothing of theirs lies elsewhere and nothing is copied from another device on the way."""
    before, num = used(), small_model.numerics()
    settings = {"max_slots": 2, "max_context": 256, "shapes": small_model.SHAPES, "speculate": 0}
    where = jax.devices()[5:7]
    first = dj.LLM(folder, numerics=num, devices=where[:1], prefix_cache=True, **settings)
    second = dj.LLM(first.model, devices=where[1:], prefix_cache=True, **settings)
    engines = first, second
    assert [llm.model.devices for llm in engines] == [(where[0],), (where[1],)]
    params = [
        dj.SamplingParams(temperature=0.9, seed=3, max_tokens=8),
        dj.SamplingParams(temperature=0.0, max_tokens=5, repetition_penalty=1.2),
    ]
    halves = prompts(150, 61), prompts(145, 7, seed=1)
    with guarded():
        streams = [llm.stream(half, params) for llm, half in zip(engines, halves, strict=True)]
        last: list[dict[int, Any]] = [{}, {}]
        for grown in itertools.zip_longest(*streams):
            for found, out in zip(last, grown, strict=True):
                if out is not None:
                    found[id(out)] = out
        first.model.forward(halves[0][1:])
    fresh = [devices for key, devices in used().items() if key not in before]
    assert {device for devices in fresh for device in devices} == set(where)
    assert max(map(len, fresh)) == 1
    together = [sorted(found.values(), key=lambda out: out.metrics.arrival) for found in last]
    for outs, other, half in zip(together, engines[::-1], halves, strict=True):
        same(outs, other.generate(half, params, strict=True))


def test_a_layout_on_devices_of_choice(folder):
    devices = jax.devices()[6:]
    model = dj.load(folder, PAIR, devices=devices)
    assert model.devices == tuple(devices)
    assert all(leaf.devices() == set(devices) for leaf in jax.tree.leaves(model.weights))
    back = model.on(devices[::-1])
    assert back.devices == tuple(devices[::-1]) and back.on(back.devices) is back
    assert groups.whole(back.weights.norm).device_set == set(devices)


def test_devices_that_cannot_be_used_are_named(folder):
    one, two, three = jax.devices()[:3]
    for devices, layout, message in (
        ([one, two], None, "devices: 2 given; layout 'single' needs 1"),
        ([one, two, three], PAIR, "devices: 3 given; layout 'pair' needs 2"),
        ([two, two], PAIR, "devices: .*1.* is there twice"),
        ([0], None, "devices: 0; expected jax devices"),
    ):
        with pytest.raises(ValueError, match=message):
            dj.LLM(folder, layout, devices=devices)
    model = dj.load(folder)
    with pytest.raises(ValueError, match="devices: 2 given; layout 'single' needs 1"):
        dj.LLM(model, devices=[one, two])
