"""Programs compiled ahead of their call, and functions that layers of one kind share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from deepinfer_jax.model.compile import jit, shared


def test_a_call_finds_what_was_compiled_ahead():
    traced, compiled = [], []

    def turn(times, held, given):
        traced.append(times)
        return held + given.sum() * times, given

    def listen(event, _, **about):
        if event.endswith("backend_compile_duration") and about.get("fun_name") == "jit(turn)":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        program = jit(turn, static_argnums=0, donate_argnums=1)
        held = jax.device_put(jnp.zeros(3), jax.devices()[0])
        given = np.ones(2, np.float32)
        program.ahead(2, held, given)
        after, _ = program(2, held, given)
        assert after.tolist() == [4.0] * 3 and held.is_deleted()
        program(2, after, given)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert traced == [2] and len(compiled) == 1


def test_what_fails_ahead_fails_in_the_call_that_needs_it():
    def refuse(x):
        raise ValueError("no such case")

    program = jit(refuse)
    program.ahead(np.ones(2))
    for _ in range(2):
        with pytest.raises(ValueError, match="no such case"):
            program(np.ones(2))


def test_layers_of_one_kind_share_a_trace():
    traced = []

    @shared("power")
    def layer(x, weights, *, power):
        traced.append((x.shape, power, isinstance(x, jax.core.Tracer)))
        return x * weights["w"] ** power

    def model(x, weights):
        for one in weights:
            x = layer(x, one, power=2)
        return layer(x[:1], weights[0], power=2), layer(x, weights[0], power=1)

    x, weights = np.full(2, 3.0, np.float32), [{"w": np.float32(i)} for i in (1, 2, 3)]
    first, second = jax.jit(model)(x, weights)
    assert traced == [((2,), 2, True), ((1,), 2, True), ((2,), 1, True)]
    assert first.tolist() == [108.0] and second.tolist() == [108.0, 108.0]
    traced.clear()
    layer(x, weights[1], power=2)
    assert traced == [((2,), 2, False)]  # no program of its own outside of one
    with pallas_kernels.record():
        jax.jit(lambda *given: model(*given))(x, weights)
    assert len(traced) == 1 + 5  # who watches kernels sees every call
