"""Disaggregation: prompts on one group, tokens on another, are those of one engine, to the bit.

Speculation, a device and a host grammar, penalties, stop strings, several samples, preemption on
the decode side. Between processes the bytes of a frame stand for the request: cut off, damaged or
foreign ones are noticed.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax import shipped
from deepinfer_jax.layout import Layout
from deepinfer_jax.runtime import frames, transport
from deepinfer_jax.runtime import state as states
from deepinfer_jax.runtime.handover import Group
from tests.runtime import small_model
from tests.runtime.runs import bits, same, scarce

FREE = dj.SamplingParams(
    temperature=0.8,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    max_tokens=14,
    logprobs=0,
    seed=5,
)
PARAMS = [
    FREE,
    dataclasses.replace(FREE, n=2, presence_penalty=0.5, min_tokens=3),
    dj.SamplingParams(
        temperature=0.8, max_tokens=20, logprobs=0, seed=5, structured={"regex": "[a-c]{3,9}"}
    ),
    dataclasses.replace(FREE, temperature=0.0, ignore_eos=True, prompt_logprobs=1),
    dataclasses.replace(FREE, max_tokens=1),
    dj.SamplingParams(
        temperature=0.9, top_k=40, logit_bias={7: 2.0}, max_tokens=30, seed=1, logprobs=0
    ),
]


@pytest.fixture(scope="module")
def work(prompts):
    return prompts(40, 150, 20, 33, 64, 90, seed=2)


@pytest.fixture(scope="module")
def mixed(llm, work):
    """One engine that does both."""
    return llm(invariant=True).generate(work, PARAMS, strict=True)


def prompt_bits(out):
    listed = out.prompt_logprobs or []
    return [None if e is None else [(k, v.hex()) for k, v in e.items()] for e in listed]


def check(mixed, found):
    same(mixed, found)
    for one, other in zip(mixed, found, strict=True):
        assert [o.text for o in one.outputs] == [o.text for o in other.outputs]
        assert [o.finish_reason for o in one.outputs] == [o.finish_reason for o in other.outputs]
        assert prompt_bits(one) == prompt_bits(other)


def test_two_loops_give_the_tokens_of_one(llm, work, mixed):
    engine = llm({"prefill": Group(slots=4)}, invariant=True)
    check(mixed, engine.generate(work, PARAMS, strict=True))
    split = engine._loop
    assert split.moved == 6 and len(split) == 0
    assert split.prompts.pages.used == split.decode.pages.used == 0
    kinds = (
        {kind for kind, *_ in split.prompts.dispatched},
        {k for k, *_ in split.decode.dispatched},
    )
    assert kinds == ({"prefill"}, {"decode"})


def test_a_share_keeps_all_but_its_grammars_place_and_the_limit(llm):
    loop = llm(invariant=True)._loop
    held = np.full(loop.pages.per_slot, -1, np.int32)
    saved = jax.device_get(loop.programs.take(loop.state, 1, held))
    found = states.moved(saved, row=3, limit=99)
    assert (found[0].grammar.grammar, found[0].limit) == (3, 99)
    back = states.moved(found, int(saved[0].grammar.grammar), int(saved[0].limit))
    assert jax.tree.all(jax.tree.map(np.array_equal, back, saved))


@pytest.mark.parametrize("host_pages", [4096, 0])
def test_preempted_where_they_decode(llm, prompts, host_pages):
    """To the host and back, or computed again there, from the tokens that came over."""
    work = prompts(100, 110, 90, 120, seed=4)
    params = [dataclasses.replace(FREE, max_tokens=60, seed=n, ignore_eos=True) for n in range(4)]
    wanted = llm(invariant=True).generate(work, params, strict=True)
    engine = llm({"prefill": Group(slots=4)}, invariant=True)
    with scarce(engine, pages=5, host_pages=host_pages):
        outs = engine.generate(work, params, strict=True)
    check(wanted, outs)
    assert sum(out.metrics.preemptions for out in outs) > 0


def collected(engine, source, count):
    found = dict(engine.resumed(source))
    assert sorted(found) == list(range(count))
    return [found[number] for number in range(count)]


@pytest.fixture(scope="module")
def sent(llm, work):
    """Frames of one engine, in the order in which prompts were done."""
    return list(llm(invariant=True).prefilled(work, PARAMS))


def test_frames_are_gone_on_from(llm, work, mixed, sent):
    """Through a socket to another engine, which has fewer slots than there are frames."""
    assert len(sent) == 7
    engine = llm({"seed": 9}, invariant=True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=transport.send, args=(theirs, sent[::-1]))
        thread.start()
        check(mixed, collected(engine, transport.receive(ours), len(work)))
        thread.join()
    assert not engine._loop.pages.used and len(engine._loop) == 0
    outs = llm(invariant=True).generate(work, PARAMS, strict=True)  # it decodes again
    check(mixed, outs)


def test_damaged_frames_are_computed_again_and_foreign_ones_refused(llm, work, mixed, sent):
    engine = llm({"seed": 9}, invariant=True)
    sizes = [len(frame) for frame in sent]
    flipped = [bytearray(frame) for frame in sent]
    flipped[0][sizes[0] - 100] ^= 1
    flipped[1] = flipped[1][: sizes[1] - 100]
    outs = collected(engine, map(bytes, flipped), len(work))
    check(mixed, outs)
    assert sum(out.metrics.recomputed for out in outs) == 2
    head = bytearray(sent[0])
    head[40] ^= 1
    for broken, message in (
        (head, "its head is cut off or damaged"),
        (sent[0][:60], "its head is cut off or damaged"),
        (b"GET / HTTP/1.1", "14 bytes that do not begin with"),
        (changed(sent[0], version=2), "version 2; this engine reads 1"),
        (changed(sent[0], shapes=[[[4], "int32"]]), "its state has other shapes"),
    ):
        with pytest.raises(frames.FrameError, match=message):
            list(engine.resumed([bytes(broken)]))
    other = llm({"seed": 9})  # not invariant
    with pytest.raises(frames.FrameError, match="computed with numerics .*invariant=True"):
        list(other.resumed(sent))
    with pytest.raises(frames.FrameError, match="computed with drafts 3, rejection False"):
        list(llm({"speculate": 0}, invariant=True).resumed(sent))
    check(mixed, collected(engine, sent, len(work)))
    with pytest.raises(ValueError, match="1 of 2 samples of request 1 came"):
        list(engine.resumed([frame for frame in sent if b'"number": 1,' in frame][:1]))


def changed(frame, **fields):
    """A frame with another head, its checksum right."""
    start = len(frames.MAGIC) + frames.LENGTH.size
    end = start + frames.LENGTH.unpack_from(frame, len(frames.MAGIC))[0]
    raw = json.dumps(json.loads(frame[start:end]) | fields).encode()
    rest = frame[end + frames.DIGEST :]
    length = frames.LENGTH.pack(len(raw))
    return frames.MAGIC + length + raw + frames._digest(raw) + rest


def test_a_stream_cut_off_is_named(llm, sent):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(transport.LENGTH.pack(len(sent[0])) + sent[0][:1000])
        with pytest.raises(transport.TransportError, match="the stream ended .* bytes before"):
            list(llm({"seed": 9}, invariant=True).resumed(transport.receive(ours)))
    with pytest.raises(ValueError, match="slots = 0; expected a positive integer"):
        Group(slots=0)


@pytest.mark.slow
def test_two_processes(llm, work, mixed, folder, tmp_path, request):
    """The other process knows the checkpoint and a port."""
    report, cache = tmp_path / "report.json", str(request.config.cache.mkdir("jax"))
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
        other = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.decode_process", str(folder), port, str(report)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "JAX_COMPILATION_CACHE_DIR": cache},
        )
        server.settimeout(600)
        connection, _ = server.accept()
        with connection:
            sent = transport.send(connection, llm(invariant=True).prefilled(work, PARAMS))
            assert other.wait(600) == 0
    assert sent == 7
    found = json.loads(report.read_text())
    assert found == {str(n): json.loads(json.dumps(bits(out))) for n, out in enumerate(mixed)}


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [False, True])
def test_other_devices_and_another_layout(folder, prompts, prefix):
    """Tokens on two devices of data parallel, prompts on two others of experts: tokens of one
    device. The second time round prompts come from the prefill group's cache."""
    devices = jax.devices()
    work, params = prompts(40, 150, 20, 33, 140, 90, seed=2), PARAMS[:3] * 2
    options = {
        "numerics": small_model.numerics(invariant=True),
        "max_slots": 4,
        "max_context": 256,
        "shapes": small_model.SHAPES,
    }
    one = dj.LLM(folder, **options).generate(work, params, strict=True)
    decode, prefill = (
        Layout.from_toml(shipped.find("layouts", name), {axis: 2})
        for name, axis in (("dp", "data"), ("ep", "expert"))
    )
    prefill = dataclasses.replace(prefill, moe_dispatch="alltoall")
    engine = dj.LLM(
        folder,
        decode,
        devices=devices[:2],
        prefill=Group(prefill, devices[4:6], slots=4),
        prefix_cache=prefix,
        **options,
    )
    for found in range(2):
        outs = engine.generate(work, params, strict=True)
        same(one, outs)
        cached = sum(out.metrics.cached_tokens for out in outs)
        # Two of the prompts have a page and two samples each.
        assert cached == (found + 1) * 256 * prefix
    loops = engine._loop.each()
    homes = [{d.id for d in leaf.devices()} for loop in loops for leaf in [loop.state.last]]
    assert homes == [{4, 5}, {0, 1}]
    assert all(loop.pages.used == 0 for loop in loops)
