"""`LLM.generate` under every layout file on eight simulated devices: tokens of one device."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest

import deepinfer_jax as dj
from converters import synthetic
from deepinfer_jax.runtime.engine import Shapes
from tests.lab import small_model
from tests.lab.test_layouts import SIZES, read
from tests.runtime.runs import same

FAST = ("tp_ep",)
# The test model without its first layer.
SHORT = {
    "num_hidden_layers": 3,
    "compress_ratios": [2, 1, 1, 0],
    "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1, 2],
    "candidate_source_layer_id": 1,
    "dspark_target_layer_ids": [1, 2],
}
LENGTHS = (5, 40, 61, 17, 33, 9, 2, 48, 20, 31)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return synthetic.write(tmp_path_factory.mktemp("layouts") / "model", small_model.hf(**SHORT))


@functools.cache
def engine(folder: Path, name: str, **options) -> dj.LLM:
    """Eight slots; prompts go through in chunks of 32."""
    return dj.LLM(
        folder,
        layout=None if name == "single" else read(name),
        numerics=dj.Numerics.preset("float32", cache_qdq=False),
        max_slots=8,
        max_context=128,
        shapes=Shapes(prefill=((8, 32),)),
        **options,
    )


def requests():
    """Ten prompts over eight slots, greedy, one of them sampled with a seed."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 500, n).tolist() for n in LENGTHS]
    greedy = dj.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    params = [dataclasses.replace(greedy, max_tokens=6 + n % 9) for n in LENGTHS]
    params[2] = dataclasses.replace(greedy, temperature=1.0, top_p=0.9, seed=7)
    return prompts, params


@functools.cache
def outcome(folder: Path, name: str):
    return engine(folder, name).generate(*requests(), strict=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SIZES],
)
def test_generated_tokens_are_those_of_one_device(folder, name):
    same(outcome(folder, name), outcome(folder, "single"), ids_only=True)
