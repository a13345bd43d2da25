"""Shards talking to each other: lookups, sums and gathers equal to one device."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.config import Numerics
from deepinfer_jax.layout import Layout
from deepinfer_jax.model import parallel, transformer
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.runtime import priced, shards
from deepinfer_jax.spec import Param
from tests.lab import small_model

IDS = jnp.ones((8, 64), jnp.int32)
LAYOUTS = {
    "single": Layout.single(),
    "rows_whole": Layout("a", (("tensor", 8),), (("vocab", ("tensor",)),)),
    "same_axis": Layout("b", (("data", 8),), (("vocab", ("data",)), ("rows", ("data",)))),
    "partly": Layout(
        "c", (("data", 2), ("tensor", 4)), (("vocab", ("data", "tensor")), ("rows", ("data",)))
    ),
    "other_axis": Layout(
        "d", (("data", 2), ("tensor", 4)), (("vocab", ("tensor",)), ("rows", ("data",)))
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("skew", [False, True])
def test_take(name, skew):
    under = LAYOUTS[name]
    rng = np.random.default_rng(0)
    table = {
        "wide": rng.standard_normal((48, 5), dtype=np.float32),
        "bytes": rng.integers(0, 256, (48, 2, 3), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
    }
    index = rng.integers(0, 48, (16, 3), dtype=np.int32)
    if skew:
        index = index % 3 + 45
    specs = parallel.specs(
        {
            "wide": Param((48, 5), "float32", ("vocab", None)),
            "bytes": Param((48, 2, 3), "float8_e4m3fn", ("vocab", None, None)),
        },
        under,
    )
    rows = under.spec(("rows", None), index.shape)
    local = functools.partial(parallel.take, layout=under, logical="vocab")
    run = jax.jit(parallel.spmd(under, local, (specs, rows), rows))
    mesh = under.mesh(jax.devices()[: under.size])
    args = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec)),
        (table, index),
        (specs, rows),
    )
    found = run(*args)
    for key, leaf in found.items():
        assert leaf.dtype == table[key].dtype
        np.testing.assert_array_equal(
            np.asarray(leaf).view(np.uint8), table[key][index].view(np.uint8)
        )


def test_what_has_no_elements_goes_through():
    """An engine without drafts has a state of [slots, 0] drafts on every shard of the slots."""
    under = LAYOUTS["same_axis"]
    rows = under.spec(("rows",), (16,))

    def local(drafts, last):
        return drafts, last + 1

    place = jax.sharding.NamedSharding(under.mesh(), rows)
    given = jax.device_put((jnp.zeros((16, 0), jnp.int32), jnp.arange(16)), place)
    drafts, last = jax.jit(parallel.spmd(under, local, (rows, rows), (rows, rows)))(*given)
    assert drafts.shape == (16, 0) and last.tolist() == list(range(1, 17))


def test_total_and_whole():
    under = LAYOUTS["other_axis"]
    x = jnp.arange(32.0).reshape(2, 16)

    def local(x):
        summed = parallel.total(x.sum(axis=1), under, "vocab")
        return summed, parallel.whole(x, under, "vocab", axis=1), parallel.total(x, under, "heads")

    spec = under.spec(("rows", "vocab"), x.shape)
    rows = under.spec(("rows",), (2,))
    x = jax.device_put(x, jax.sharding.NamedSharding(under.mesh(), spec))
    summed, gathered, same = jax.jit(parallel.spmd(under, local, spec, (rows, rows, spec)))(x)
    np.testing.assert_array_equal(summed, x.sum(axis=1))
    np.testing.assert_array_equal(gathered, x)
    np.testing.assert_array_equal(same, x)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"embed": "a"}, r"embed -> \('a',\); the model keeps it whole"),
        ({"heads": "a"}, r"heads -> \('a',\) but o_group -> \(\); they go together"),
        ({"slots": "a"}, "slots -> .* but pages -> .*; they go together"),
        ({"slots": "a", "pages": "a", "rows": "b"}, r"rows -> \('b',\) must begin with slots"),
        ({"ffn": "a", "rows": "a"}, r"ffn and rows both on mesh axis \['a'\]"),
        ({"ffn": "a", "expert": "a"}, r"ffn and expert both on mesh axis \['a'\]"),
    ],
)
def test_layouts_the_model_does_not_implement(rules, message):
    under = Layout("odd", (("a", 2), ("b", 4)), tuple((k, (v,)) for k, v in rules.items()))
    with pytest.raises(ValueError, match=f"layout 'odd': {message}"):
        parallel.check(under, small_model.config())


SPLIT = (("heads", ("tensor",)), ("o_group", ("tensor",)))


@pytest.mark.parametrize(
    "use",
    [
        lambda under, cfg: shards.check(under, cfg, (32,)),
        lambda under, cfg: priced.parameters(cfg, under),
        lambda under, cfg: priced.decode(cfg, under, Numerics(), batch=8, context=64),
        lambda under, cfg: priced.prefill(cfg, under, Numerics(), batch=8, context=64),
        lambda under, cfg: transformer.forward(
            Setup(cfg, under), transformer.abstract(cfg), IDS, IDS[:, 0]
        ),
    ],
    ids=["engine", "show", "priced decode", "priced prefill", "forward"],
)
def test_heads_split_finer_than_output_groups(use):
    """Heads and the rows of every matrix divide; the heads of a group are on two shards."""
    cfg = small_model.config(num_attention_heads=16, o_groups=4, o_lora_rank=64)
    parallel.specs(transformer.abstract(cfg), Layout("split", (("tensor", 8),), SPLIT))
    message = r"'split': o_group -> \('tensor',\) of 8 shards; expected a divisor of o_groups = 4"
    with pytest.raises(ValueError, match=message):
        use(Layout("split", (("tensor", 8),), SPLIT), cfg)
    parallel.check(Layout("split", (("tensor", 4),), SPLIT), cfg)
