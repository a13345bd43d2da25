"""Nothing compiles after `warm_up`, and no step waits for the one before it."""

import logging

import jax
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.runtime.programs import compiled_programs
from tests.runtime.small_model import VOCAB


class _Compilations(logging.Handler):
    """Names of what jax compiles, as it logs them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def emit(self, record):
        text = record.getMessage()
        if text.startswith("Compiling "):
            self.names.append(text.split()[1])


@pytest.fixture
def compilations():
    """Counts every compilation, small ones outside our programs included."""
    handler = _Compilations()
    names = ("interpreters.pxla", "dispatch", "compiler")
    loggers = [logging.getLogger(f"jax._src.{name}") for name in names]
    loggers[0].addHandler(handler)
    for logger in loggers:
        logger.propagate = False  # thousands of lines
    jax.config.update("jax_log_compiles", True)
    yield handler.names
    jax.config.update("jax_log_compiles", False)
    for logger in loggers:
        logger.propagate = True
    loggers[0].removeHandler(handler)


def _mixed(count):
    """Requests of every kind."""
    rng = np.random.default_rng(11)
    for number in range(count):
        options = {"max_tokens": int(rng.integers(1, 12)), "temperature": 0.0, "ignore_eos": True}
        kind = number % 10
        if kind in (1, 2):
            options |= {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01}
        if kind == 3:
            options |= {"logprobs": 3, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}}
        if kind == 4:
            options |= {"prompt_logprobs": 1, "logprobs": 0}
        if kind == 5:
            options = {"structured": {"regex": f"[a-d]{{2,{3 + number % 5}}}"}, "max_tokens": 20}
        if kind == 6:
            options |= {"stop": ["xq", "zz"], "n": 2, "temperature": 0.8}
        if kind == 7:
            options |= {"forced_token_ids": [5, 6], "max_tokens": 4}
        if kind == 8:
            options |= {"stop_token_ids": [77], "min_tokens": 1, "banned_token_ids": [9]}
        length = 0 if kind == 9 and number % 20 == 9 else int(rng.integers(1, 120))
        yield rng.integers(3, VOCAB - 2, length).tolist(), dj.SamplingParams(**options)


@pytest.mark.parametrize("widths", ["all", pytest.param("chosen", marks=pytest.mark.slow)])
def test_nothing_compiles_after_warm_up(llm, adaptive, compilations, monkeypatch, widths):
    """chosen: with step times that make each of the adaptive widths the best in its turn."""
    engine = llm(adaptive if widths == "chosen" else None, invariant=True)
    engine.warm_up()
    loop, sizes = engine._loop, sorted({rows for _, rows in engine._loop.costs}) or [0]
    programs = sum(program.variants() for program in compiled_programs())
    compilations.clear()
    work, outs, before = list(_mixed(200)), [], loop.dispatched.copy()
    for number, size in enumerate(sizes):
        seconds = {key: 1.0 if key[1] == size else 1e9 for key in loop.costs}
        monkeypatch.setattr(loop, "costs", seconds)
        prompts, params = zip(*work[number :: len(sizes)], strict=True)
        outs += engine.generate(list(prompts), list(params))
    assert sum(out.error is not None for out in outs) == 10  # the empty prompts
    assert compilations == []
    assert sum(program.variants() for program in compiled_programs()) == programs
    if widths == "chosen":
        used = {rows for kind, _, rows in loop.dispatched - before if kind == "decode"}
        assert len(sizes) == 3 and used == set(sizes)


def test_warm_up_waits_for_no_request(llm):
    engine = llm(invariant=True)
    stream = engine.stream([[5, 6]], dj.SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    with pytest.raises(ValueError, match="in flight"):
        engine.warm_up()
    stream.close()


@pytest.mark.parametrize("speculate", [0, None, pytest.param("adaptive", marks=pytest.mark.slow)])
def test_a_step_is_sent_before_the_one_before_it_is_read(
    llm, prompts, adaptive, monkeypatch, speculate
):
    """Planning and dispatching see only what earlier reads gave, and one read a step is all."""
    options = adaptive if speculate == "adaptive" else {"speculate": speculate}
    engine = llm(options, invariant=True)
    loop, events, waits = engine._loop, [], []
    dispatch, consume, get = loop._dispatch, loop._consume, jax.device_get

    def sent(step):
        events.append(("sent", step.number))
        return dispatch(step)

    def read(flight):
        events.append(("read", flight.step.number))
        consume(flight)

    def counted(value):
        waits.append(type(value).__name__)
        return get(value)

    monkeypatch.setattr(loop, "_dispatch", sent)
    monkeypatch.setattr(loop, "_consume", read)
    monkeypatch.setattr(jax, "device_get", counted)
    monkeypatch.setattr(jax, "block_until_ready", lambda value: pytest.fail("a wait"))
    params = dj.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.generate(prompts(5, 40), params, strict=True)
    order = [number for what, number in events if what == "sent"]
    assert order == sorted(order) == [number for what, number in events if what == "read"]
    place = {event: at for at, event in enumerate(events)}
    late = [n for n in order[:-1] if place["sent", n + 1] > place["read", n]]
    assert not late, f"steps read before the next was sent: {late}"
    assert len(waits) == len(order)


def test_requests_of_a_prefill_are_admitted_together(llm, prompts, monkeypatch):
    engine, together = llm(invariant=True), []
    loop = engine._loop
    admit = loop.programs.admit

    def counted(held, slots, *rows):
        together.append(int((slots >= 0).sum()))
        return admit(held, slots, *rows)

    monkeypatch.setattr(loop.programs, "admit", counted)
    params = dj.SamplingParams(temperature=0.5, max_tokens=3, ignore_eos=True)
    engine.generate(prompts(5, 9, 7, 6), params, strict=True)
    assert together == [2, 2], "as many as a prefill has room for"


def test_what_is_read_is_small(llm, prompts, monkeypatch):
    """Nothing of the size of a cache or of logits comes to the host."""
    engine, sizes = llm(invariant=True), []
    get = jax.device_get

    def sized(value):
        found = get(value)
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(found)))
        return found

    monkeypatch.setattr(jax, "device_get", sized)
    params = dj.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.generate(prompts(5), params, strict=True)
    assert max(sizes) < 1000
