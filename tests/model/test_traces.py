"""What traced programs of a small model say of themselves: shapes and types; nothing is run."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from deepinfer_jax import spec
from deepinfer_jax.bench import slices
from deepinfer_jax.bench.counts import Rows
from deepinfer_jax.config import Numerics
from deepinfer_jax.model import transformer
from deepinfer_jax.model.cache import PAGE
from deepinfer_jax.model.capture import NAMES, ROW_NAMES
from deepinfer_jax.model.setup import Setup
from pallas_kernels import Kernels
from tests.lab import small_model

PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")
KERNELS = {
    "reference": Kernels.parse("reference"),
    "xla": Kernels.parse({"row_matmul": "xla", "grouped_gemm": "xla"}),
}


def arguments(setup: Setup, length: int) -> tuple[Any, Any, Any]:
    """Abstract weights, tokens [1, length] and lengths of `transformer.forward`."""
    classes = jax.ShapeDtypeStruct((setup.cfg.vocab_size,), jnp.int32)
    weights = spec.abstract(transformer.abstract(setup.cfg)).replace(token_map=classes)
    return (
        weights,
        jax.ShapeDtypeStruct((1, length), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )


@pytest.mark.parametrize("length", [1, 2, PAGE])
def test_captures_have_the_shape_of_their_name(length):
    """One sequence of one token has as many rows as sequences, and as many as pages."""
    cfg = small_model.config()
    setup = Setup(cfg, numerics=Numerics.preset("float32"))
    forward = functools.partial(transformer.forward, setup, capture=tuple(NAMES))
    logits, found = jax.eval_shape(forward, *arguments(setup, length))
    assert logits.shape == (1, length, cfg.vocab_size)
    assert set(found) == NAMES and all(found.values())
    for name in ROW_NAMES:
        assert {value.shape[:2] for value in found[name].values()} == {(1, length)}, name
    for name, width in (("compressed_kv", cfg.head_dim), ("index_keys", cfg.index_head_dim)):
        shapes = {layer: value.shape for layer, value in found[name].items()}
        assert shapes == {1: (1, PAGE // 2, width), 2: (1, PAGE, width)}, name


def products(jaxpr: Any) -> Iterator[Any]:
    """Every product of a jaxpr, those of its inner programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRODUCTS:
            yield equation
        for body in jaxprs_in_params(equation.params):
            yield from products(body)


def narrow(equation: Any) -> bool:
    """A product of operands below 32 bits."""
    return any(value.aval.dtype.itemsize < 4 for value in equation.invars[:2])


def sums(equation: Any) -> Any:
    """The type that a product says it adds up in."""
    return equation.params["preferred_element_type"]


@pytest.mark.parametrize("preset", ["reference", "float32"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("phase", ["forward", "prefill", "decode"])
def test_every_product_states_float32_sums(phase, kernels, preset):
    """A product of bfloat16 or FP8 without a stated type may be added up in that type, on some
    devices only. Pallas kernels have no such choice: their accumulators are float32 memory."""
    cfg, numerics = small_model.config(), Numerics.preset(preset)
    if phase == "forward":
        setup = Setup(cfg, kernels=KERNELS[kernels], numerics=numerics)
        function, args = functools.partial(transformer.forward, setup), arguments(setup, 32)
    else:
        rows = Rows(2, 4, 60) if phase == "decode" else Rows(2, 32)
        one = slices.rank(cfg, 1, numerics, phase, rows, kernels=KERNELS[kernels])
        trees = (one.weights, one.carry, one.given)
        function, args = one.turn, tuple(spec.abstract(tree) for tree in trees)
    found = list(products(jax.make_jaxpr(function)(*args).jaxpr))
    assert len(found) > 20
    if (kernels, preset) == ("xla", "reference"):
        assert any(map(narrow, found)), "else nothing is looked at"
    wrong = [str(one) for one in found if narrow(one) and sums(one) != jnp.float32]
    assert not wrong, "\n".join(wrong)


def test_a_product_that_states_nothing_is_found():
    x = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    (one,) = products(jax.make_jaxpr(jax.jit(lambda x: x @ x))(x).jaxpr)
    assert narrow(one) and sums(one) != jnp.float32
