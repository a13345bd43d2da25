"""Several replicas behind one engine: the results of one, whatever fails and when.

Here all replicas share a device and so what is compiled; a slow test has them on different ones.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import deepinfer_jax as dj
from converters import synthetic
from deepinfer_jax.runtime import groups, reading
from deepinfer_jax.runtime.handover import Group
from deepinfer_jax.runtime.loop import Loop
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from deepinfer_jax.runtime.scheduler import State
from tests.runtime import small_model
from tests.runtime.runs import bits, same, scarce

ITEM = {"type": "object", "properties": {"id": {"type": "integer"}, "ok": {"type": "boolean"}}}


def requests(prompts) -> tuple[list[list[int]], list[dj.SamplingParams]]:
    """Ten, of every sort; two begin alike for more than a page, some grow into another one."""
    work = prompts(4, 122, 14, 119, 7, 121, 140, 21, 120, 3)
    work[7] = work[6][:130] + work[7]
    free = [
        dj.SamplingParams(temperature=0.0, max_tokens=14, logprobs=0),
        dj.SamplingParams(temperature=0.9, seed=1, max_tokens=18, ignore_eos=True, logprobs=0),
        dj.SamplingParams(temperature=0.8, top_p=0.9, n=2, max_tokens=12, logprobs=0),
        dj.SamplingParams(temperature=1.0, seed=2, repetition_penalty=1.3, max_tokens=24),
        dj.SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5, max_tokens=20),
    ]
    shaped: list[dict[str, Any]] = [{"json_schema": ITEM}, {"regex": "[a-f]{3,20}(, [0-9]+)*"}]
    grammar = [
        dj.SamplingParams(temperature=1.0, seed=seed, structured=spec, max_tokens=40)
        for seed, spec in enumerate(shaped)
    ]
    return work, [*free, *grammar, free[1], grammar[0], free[0]]


def wanted(one: dj.LLM, work: Any, params: Any) -> Any:
    """Of one engine, as its first requests: those without a seed get it from their number."""
    one._requests = 0
    return one.generate(work, params, strict=True)


@functools.cache
def engine(model: dj.LLM, count: int, cached: bool) -> dj.LLM:
    """As many replicas on the device of another engine, and as that one is otherwise."""
    return dj.LLM(
        model.model,
        replicas=count,
        devices=list(model.model.devices) * count,
        max_slots=4,
        max_context=small_model.CONTEXT,
        shapes=small_model.SHAPES,
        prefix_cache=cached,
    )


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_the_results_of_one_engine(count, llm, prompts):
    work, params = requests(prompts)
    want = wanted(llm(invariant=True), work, params)
    several = engine(llm(invariant=True), count, cached=True)
    same(several.generate(work, params, strict=True), want)
    reports = several.replicas.report()
    assert all(one.given > 1 and one.steps > 1 and not one.moved for one in reports)
    assert sum(one.given for one in reports) == sum(one.n for one in params)
    assert all(one.queue == 0 and one.failure is None for one in reports)
    again = several.generate([work[6], work[7]], params[6:8], strict=True)
    assert bits(again[1]) == bits(want[7]) and again[1].metrics.cached_tokens >= 128


def stop(llm: dj.LLM, at: int) -> contextlib.AbstractContextManager[Any]:
    llm.replicas.stop(at, "a word from outside")
    return contextlib.nullcontext()


@contextlib.contextmanager
def broken(name: str, llm: dj.LLM, at: int):
    """A loop whose next step, or the reading of one, raises."""
    loop = llm._loops[at]

    def fails(*given: Any) -> Any:
        raise RuntimeError("device\nlost")

    setattr(loop, name, fails)
    yield
    delattr(loop, name)


def first(loop: Loop) -> bool:
    """Before any token is there."""
    return loop.oldest is not None and not any(
        one.output.token_ids for one in loop._samples.values()
    )


def middle(loop: Loop) -> bool:
    """One is inside its grammar."""
    begun = [one for one in loop._samples.values() if len(one.output.token_ids) > 2]
    return any(one.params.structured for one in begun)


def preempted(loop: Loop) -> bool:
    """One with output has its state on the host, where that is lost too."""
    return any(
        loop.scheduler.state(number) is State.HOST and one.output.token_ids
        for number, one in loop._samples.items()
        if number in loop.scheduler._jobs
    )


MOMENTS = {
    "first, stopped": (first, stop),
    "first, while sent": (first, functools.partial(broken, "_dispatch")),
    "middle, stopped": (middle, stop),
    "middle, while read": (middle, functools.partial(broken, "_consume")),
    "preempted": (preempted, stop),
}


@contextlib.contextmanager
def failing(several: dj.LLM, when: Callable[[Loop], bool], how: Any) -> Iterator[list[int]]:
    """The first replica of which that is true fails then; its number is in the list."""
    turn, chosen = several.replicas.turn, []
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def turned() -> None:
            turn()
            if not chosen and (true := [n for n, one in enumerate(several._loops) if when(one)]):
                chosen.append(true[0])
                stack.enter_context(how(several, true[0]))

        patch.setattr(several.replicas, "turn", turned)
        yield chosen


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_replica_that_fails_loses_nothing(moment, llm, prompts):
    """Speculation and grammars on. Streams never take back what they gave."""
    work, params = requests(prompts)
    want = wanted(llm(invariant=True), work, params)
    several = engine(llm(invariant=True), 2, cached=False)
    several._requests = 0
    before, (when, how) = several.replicas.report(), MOMENTS[moment]
    given: dict[int, Any] = {}
    texts: dict[int, list[str]] = {}
    ended: set[int] = set()
    with contextlib.ExitStack() as stack:
        for loop in several._loops if moment == "preempted" else ():
            stack.enter_context(scarce(SimpleNamespace(_loop=loop), pages=3))
        chosen = stack.enter_context(failing(several, when, how))
        for out in several.stream(work, params):
            now = [output.text for output in out.outputs]
            had = texts.setdefault(id(out), [""] * len(now))
            assert all(b.startswith(a) for a, b in zip(had, now, strict=True))
            assert id(out) not in ended
            texts[id(out)], given[id(out)] = now, out
            if out.finished:
                ended.add(id(out))
    (at,) = chosen
    failed = several.replicas.report()[at]
    several.replicas.restart(at)
    outs = sorted(given.values(), key=lambda out: out.metrics.arrival)
    same(outs, want)
    moves = sum(out.metrics.moves for out in outs)
    assert failed.failure is not None and moves == failed.moved - before[at].moved > 0
    same(several.generate(work[:1], params[:1]), want[:1])  # the replica serves again


def test_what_has_ended_stays_ended(llm, prompts, monkeypatch):
    """Reading a step breaks off after one of its two requests has ended: only the other moves."""
    work, names = prompts(9, 9), ("routes",)
    params = [
        dj.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)
        for count in (6, 24)
    ]
    want = llm(invariant=True).generate(work, params, names, strict=True)
    several, read, ended = engine(llm(invariant=True), 2, cached=False), reading.read_tokens, []

    def breaks(sample: Any, found: Any, place: int) -> Any:
        if len(ended) == 1 and ended[0] is found:
            ended.append(found)
            several.replicas.restart(1)
            raise RuntimeError("device lost")
        outcome = read(sample, found, place)
        if outcome.finished:
            ended.append(found)
        return outcome

    monkeypatch.setattr(reading, "read_tokens", breaks)
    several.replicas.stop(1, "a word from outside")
    outs = several.generate(work, params, names, strict=True)
    failed = several.replicas.report()[0].failure
    several.replicas.restart(0)
    assert failed == "RuntimeError: device lost"
    assert [out.metrics.moves for out in outs] == [0, 1]
    same(outs, want)
    for out, one in zip(outs, want, strict=True):
        for layer, rows in one.outputs[0].captured["routes"].items():
            np.testing.assert_array_equal(out.outputs[0].captured["routes"][layer], rows)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same model with other weights."""
    return synthetic.write(tmp_path_factory.mktemp("changed") / "m", small_model.CONFIG, seed=8)


def test_a_restarted_replica_has_the_newest_weights(llm, prompts, folder, changed, monkeypatch):
    work, params = requests(prompts)
    several = engine(llm(invariant=True), 2, cached=True)

    def by(number: int) -> list[Any]:
        """Of one replica alone."""
        several.replicas.restart(number)
        several.replicas.stop(1 - number, "a word from outside")
        return several.generate(work[6:7], params[3], strict=True)

    old = by(1)
    same(by(0), old)
    several.swap_weights(changed)
    new = by(1)
    same(by(0), new)
    assert new[0].outputs[0].token_ids != old[0].outputs[0].token_ids
    one, other = (loop.prefix for loop in several._loops)
    assert one is not None and other is not None and one._identity == other._identity
    moved, calls = groups.moved, []

    def lost(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("device lost")
        return moved(*given)

    with monkeypatch.context() as patch:  # the second replica is not there, the first goes on
        patch.setattr(groups, "moved", lost)
        several.swap_weights(folder)
    with pytest.raises(ValueError, match="replica 1: its weights are those before the last swap"):
        several.replicas.restart(1)
    same(several.generate(work[6:7], params[3], strict=True), old)
    several.swap_weights(folder)
    same(by(1), old)
    several.replicas.restart(0)


def test_prefixes_of_the_replicas_that_serve_are_saved(llm, prompts, tmp_path):
    model = llm(invariant=True).model
    several = dj.LLM(
        model,
        replicas=2,
        devices=list(model.devices) * 2,
        max_slots=4,
        max_context=small_model.CONTEXT,
        shapes=small_model.SHAPES,
        prefix_cache=PrefixPolicy(every=1, folder=tmp_path),
    )
    several.generate(prompts(140, 150), dj.SamplingParams(max_tokens=4), strict=True)
    assert all(one.prefix is not None and one.given for one in several.replicas.report())
    several.replicas.stop(1, "a word from outside")
    several.save_prefixes()
    assert len(list(tmp_path.rglob("*.page"))) == 1


def test_what_is_left_when_the_last_one_fails(llm, prompts):
    work, params = requests(prompts)
    several = engine(llm(invariant=True), 2, cached=False)
    outs = []
    with contextlib.ExitStack() as stack:
        for out in several.stream(work, params):
            outs.append(out)
            if out.finished and several.replicas.report()[0].failure is None:
                several.replicas.stop(0, "a word from outside")
                stack.enter_context(broken("_consume", several, 1))
    ended = list({id(out): out for out in outs}.values())
    assert len(ended) == len(work) and all(out.finished for out in ended)
    errors = [out.error for out in ended if out.error is not None]
    message = "no replica is left: replica 1 ended with RuntimeError: device lost"
    assert 0 < len(errors) < len(work) and set(errors) == {message}
    (late,) = several.generate([work[0]], params[0])
    assert late.error == message and late.outputs[0].finish_reason == "error"
    assert len(several.replicas) == 0
    for number in (0, 1):
        several.replicas.restart(number)
    assert several.generate([work[0]], params[0], strict=True)[0].outputs[0].token_ids
    with pytest.raises(ValueError, match=r"replica 2; expected 0\.\.1"):
        several.replicas.stop(2, "")


def test_aborted_requests_leave_every_replica(llm, prompts):
    work, params = requests(prompts)
    several = engine(llm(invariant=True), 2, cached=False)
    stream = several.stream(work, params)
    next(stream)
    assert all(len(loop) for loop in several._loops)
    stream.close()
    assert len(several.replicas) == 0 and all(loop.pages.used == 0 for loop in several._loops)


def test_numbers_of_replicas_that_cannot_be_are_named(folder, llm):
    one, two = jax.devices()[:2]
    for options, message in (
        ({"replicas": 0}, "replicas = 0; expected a positive integer"),
        ({"replicas": 9}, "replicas = 9: layout 'single' needs 9 times 1 devices; there are 8"),
        ({"replicas": 3, "devices": [one, two]}, "needs 3 times 1 devices; there are 2"),
    ):
        with pytest.raises(ValueError, match=message):
            dj.LLM(folder, **options)
    with pytest.raises(ValueError, match="this engine has one group"):
        _ = llm(invariant=True).replicas
    with pytest.raises(ValueError, match="replicas: not together with prefill"):
        dj.LLM(folder, replicas=2, prefill=Group())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_replicas_on_devices_of_their_own(folder, prompts):
    """Two and three; one read of the weights; one of three fails in the middle."""
    num, work = small_model.numerics(invariant=True), requests(prompts)
    settings = {"numerics": num, "max_slots": 4, "max_context": small_model.CONTEXT}
    settings["shapes"] = small_model.SHAPES
    devices = jax.devices()[:3]
    single = dj.LLM(folder, **settings)
    want = single.generate(*work, strict=True)
    for count in (2, 3):
        several = dj.LLM(single.model, replicas=count, **settings)
        same(several.generate(*work, strict=True), want)
        reports = several.replicas.report()
        assert [one.devices for one in reports] == [(device,) for device in devices[:count]]
        assert all(one.given > 1 for one in reports)
        for loop, device in zip(several._loops, devices, strict=False):
            assert {d for leaf in jax.tree.leaves(loop.state) for d in leaf.devices()} == {device}
    several._requests = 0
    with failing(several, middle, functools.partial(broken, "_consume")) as chosen:
        same(several.generate(*work, strict=True), want)
    assert several.replicas.report()[chosen[0]].moved > 0
