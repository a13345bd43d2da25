"""The name table: the released census from declarations alone, and a bijection for any config."""

import collections

import pytest

from converters import names, synthetic
from deepinfer_jax import shipped
from deepinfer_jax.config import ModelConfig


@pytest.fixture(scope="module")
def released() -> names.Table:
    return names.table(ModelConfig.from_json(shipped.find("models", "v41-flash")))


def test_released_census(released):
    """Tensors, bytes and dtypes of the released checkpoint, without reading one."""
    assert len(released.by_name) == 96_085
    assert released.nbytes == 510_286_023_000
    count: collections.Counter = collections.Counter()
    size: collections.Counter = collections.Counter()
    for entry in released.by_name.values():
        count[entry.dtype] += 1
        size[entry.dtype] += entry.nbytes
    assert count == {"I8": 47_232, "F8_E8M0": 47_589, "F8_E4M3": 357, "BF16": 520, "F32": 387}
    assert size == {
        "I8": 278_585_671_680,
        "F8_E8M0": 23_563_015_184,
        "F8_E4M3": 204_015_223_296,
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
    }


def test_released_parameters(released):
    """Backbone with embedding and head, Engram tables, drafter and vision, each counted apart."""

    def count(prefix: str) -> int:
        return names.parameters(released.params, prefix)

    tables = count("layers/1/engram/table") + count("layers/14/engram/table")
    wkv = count("layers/1/engram/wkv") + count("layers/14/engram/wkv")
    gates = sum(count(f"layers/{layer}/engram/{w}_weight") for layer in (1, 14) for w in "qk")
    layers = count("layers/") - tables - wkv - gates
    assert layers == 550_242_348_144
    assert layers + wkv + count("embed") + count("head") == 551_880_748_144
    assert tables == 196_613_849_600
    assert count("draft/") == 14_225_362_530
    assert count("vision/") == 485_253_120


def test_released_names(released):
    """Spot checks in both directions."""
    entry = released.by_name["layers.39.ffn.experts.383.w3.scale"]
    assert (entry.leaf, entry.index) == ("layers/39/ffn/w13/scales", (383, 1))
    assert (entry.shape, entry.dtype) == ((2304, 160), "F8_E8M0")
    assert released.by_name["mtp.2.markov_head.head.weight"].leaf == "draft/markov_head"
    assert released.by_name["mtp.0.main_proj.scale"].shape == (160, 480)
    assert released.by_name["layers.14.engram.embed.weight"].shape == (384_016_682, 256)
    assert released.by_name["vision.blocks.31.mlp.w1.weight"].leaf == "vision/blocks/31/w1"
    assert "layers.20.attn.compressor.wgate.weight" not in released.by_name
    assert released.by_leaf["layers/0/attn/sink"][0].name == "layers.0.attn.attn_sink"


@pytest.mark.parametrize("seed", range(6))
def test_bijection(seed):
    """Every leaf element belongs to exactly one tensor, every tensor to one place of a leaf."""
    cfg = ModelConfig.from_hf(synthetic.draw_config(seed, vision=True))
    table = names.table(cfg)
    places = {(entry.leaf, entry.index) for entry in table.by_name.values()}
    assert len(places) == len(table.by_name)
    for leaf, entries in table.by_leaf.items():
        param = table.params[leaf]
        assert sum(entry.nbytes for entry in entries) == param.nbytes
        assert all(table.by_name[entry.name] is entry for entry in entries)
        stack = len(entries[0].index)
        assert all(entry.shape == param.shape[stack:] for entry in entries)


def test_number_of_drafters_moves_the_last_stage():
    seen = set()
    for seed in range(8):
        cfg = ModelConfig.from_hf(synthetic.draw_config(seed))
        last = cfg.num_nextn_predict_layers - 1
        found = [name for name in names.table(cfg).by_name if "confidence_head" in name]
        assert found == [f"mtp.{last}.confidence_head.proj.weight"]
        seen.add(last)
    assert seen == {1, 2}


def test_paths_under_prefixes():
    assert names.under("layers/3/attn/wkv/values", ["layers/3"])
    assert names.under("embed", ["embed"])
    assert not names.under("layers/30/attn/wkv/values", ["layers/3"])
