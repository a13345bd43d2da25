"""Step times: measured once for what they depend on, then read from disk."""

import json

import jax

import deepinfer_jax as dj
from deepinfer_jax.runtime import warmup


def test_the_cost_curve_is_measured_once_and_kept(llm, tmp_path, monkeypatch):
    loop = llm(invariant=True)._loop
    measured = []

    def measure(given):
        measured.append(given)
        return {(4, rows): 0.001 * rows for rows in given.buckets()[4]}

    monkeypatch.setattr(warmup, "measure", measure)
    folder = tmp_path / "new" / "folder"
    first = warmup.step_seconds(loop, folder)
    assert first == {(4, 16): 0.016} and measured == [loop]
    assert warmup.step_seconds(loop, folder) == first and len(measured) == 1
    (file,) = folder.iterdir()  # nothing half written stays
    assert json.loads(file.read_text(encoding="utf-8"))["seconds"] == [[4, 16, 0.016]]

    # Another choice of numerics, slots or drafts is another curve.
    other = llm({"speculate": 0}, invariant=True)._loop
    assert warmup.step_seconds(other, folder) == {(4, 4): 0.004}
    assert len(measured) == 2 and len(list(folder.iterdir())) == 2


def test_every_bucket_is_timed_and_the_state_left_empty(llm, monkeypatch):
    """The median of the runs after the first, which may compile, with every row in use."""
    loop, seconds, sizes = llm(invariant=True)._loop, iter([9.0, 3.0, 1.0, 2.0, 5.0, 4.0]), []
    begun = []

    def timed(loop, run, *given):
        size, _, sent = given[1:]
        assert (sent.slot >= 0).all() and (sent.budget == size - len(sent.slot)).all()
        sizes.append(size)
        return next(seconds)

    monkeypatch.setattr(warmup, "_timed", timed)
    monkeypatch.setattr(warmup, "_begin", lambda _, steps: begun.extend(steps))
    assert warmup.measure(loop) == {(4, 16): 3.0}
    assert [size for _, size, *_ in begun] == [16]
    assert sizes == [16] * 6
    assert bool(loop.state.done.all()) and not int(loop.state.length.max())


def test_the_decode_step_begun_with_the_prompts_is_the_one_they_use(llm, monkeypatch):
    engine = llm(invariant=True)
    loop, begun, used = engine._loop, [], []
    decode = loop.programs.decode
    monkeypatch.setattr(loop.programs, "begun", set())
    monkeypatch.setattr(loop.programs, "begin_decode", lambda *given: begun.append(given))
    monkeypatch.setattr(
        loop.programs, "decode", lambda *given: used.append(given) or decode(*given)
    )
    params = dj.SamplingParams(max_tokens=4, ignore_eos=True)
    for _ in range(2):
        engine.generate([[5, 6], [7, 8, 9]], params)
    ((size, options, *arrays),) = begun  # once, however often it is needed
    assert used[0][:2] == (size, options)
    sent = list(used[0][2:])
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), one) for one in (arrays, sent)]
    assert shapes[0] == shapes[1]
    begun.clear()
    engine.generate([[5, 6]], dj.SamplingParams(max_tokens=1))
    assert begun == []  # the prompt's own program gives the only token
