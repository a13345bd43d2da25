"""The prefix cache under layouts of eight simulated devices: warm, evicted, from files, to the bit.

Against the same engine when nothing is cached yet, with `invariant=True`: the layout of an engine
is part of what its bits are. Slots and pages of data-parallel layouts are cut into shards, so a
prefix is also found by requests of shards that do not have its pages.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import deepinfer_jax as dj
from converters import synthetic
from deepinfer_jax.runtime.engine import Shapes
from deepinfer_jax.runtime.prefix_types import PrefixPolicy
from tests.lab import small_model
from tests.lab.test_engine_layouts import SHORT
from tests.lab.test_layouts import SIZES, read
from tests.runtime.runs import same


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return synthetic.write(tmp_path_factory.mktemp("prefix") / "model", small_model.hf(**SHORT))


def engine(folder: Path, name: str, policy: PrefixPolicy | None = None) -> dj.LLM:
    return dj.LLM(
        folder,
        read(name),
        numerics=dj.Numerics.preset("float32", cache_qdq=False, invariant=True),
        max_slots=8,
        max_context=320,
        shapes=Shapes(prefill=((8, 32),)),
        prefix_cache=policy or False,
    )


def work():
    """Six prompts after one text of 140 tokens, two others."""
    rng = np.random.default_rng(8)
    text = rng.integers(3, 500, 140).tolist()
    prompts = [text + rng.integers(3, 500, count).tolist() for count in (3, 9, 130, 5, 20, 1)]
    prompts += [rng.integers(3, 500, count).tolist() for count in (150, 20)]
    params = dj.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    drawn = dataclasses.replace(params, temperature=1.0, seed=3, repetition_penalty=1.2)
    return prompts, [params, drawn] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_found_on_devices_on_the_host_and_in_files(folder, name, tmp_path):
    prompts, params = work()
    cold = engine(folder, name).generate(prompts, params, strict=True)
    llm = engine(folder, name, PrefixPolicy(every=1, folder=tmp_path))

    def again(llm, found):
        outs = llm.generate(prompts, params, strict=True)
        same(cold, outs)
        assert [out.metrics.cached_tokens for out in outs] == found

    warm = [128, 128, 256, 128, 128, 128, 128, 0]
    first = llm.generate(prompts, params, strict=True)
    same(cold, first)
    computed = [len(p) - o.metrics.cached_tokens for p, o in zip(prompts, first, strict=True)]
    assert sum(length > 128 for length in computed) == 3, "the text once, what goes on, another"
    again(llm, warm)
    pages = llm._loop.pages
    for shard in range(pages.shards):
        pages.evict(shard)
    assert not pages._kept
    again(llm, warm)
    llm.save_prefixes()
    again(engine(folder, name, PrefixPolicy(every=1, folder=tmp_path)), warm)


def test_pages_and_rings_move_between_shards_to_the_bit(folder):
    """`take_pages`, `put_pages`, `take_rings`, `put_rings` of random bytes."""
    programs = engine(folder, "tp_ep")._loop.programs
    state = small_model.random_state(programs)
    before = jax.device_get(state)
    rings = programs.take_rings(state, 6)
    contents = programs.take_pages(state, [7, 1])
    state = programs.put_rings(state, 1, rings)
    state = programs.put_pages(state, [(2, contents[0]), (5, contents[1])])
    after = jax.device_get(state)
    paged = small_model.paged(before.cache)
    held = {id(leaf) for leaf in jax.tree.leaves(before.cache)} - paged
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        want = old.copy()
        if id(old) in paged:
            want[[2, 5]] = old[[7, 1]]
        elif id(old) in held:
            want[1] = old[6]
        assert np.ascontiguousarray(new).tobytes() == np.ascontiguousarray(want).tobytes()
