"""Products of a traced or compiled program, counted without the project's own pricing.

`traced` walks a jaxpr and adds 2 m n k of every dot_general; kernel calls are their references,
traced as they are, but the grouped products, whose portable forms compute rows that belong to no
expert: there each row is multiplied by one expert's matrices, which is what the rows come to.
`compiled` reads the dots of the compiled program's text.
"""

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

import pallas_kernels
from deepinfer_jax.lab import hlo


def _kernel(op: str, function: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    if op != "grouped_gemm":
        module = importlib.import_module(f"pallas_kernels.{op}.reference")
        return getattr(module, function)(*args, **kwargs)
    x, values, *rest = args
    if function == "gate_up" and rest[3] is not None:
        x = x[rest[3]]
    packed = 2 if values.dtype == jnp.uint8 else 1
    one = jnp.zeros((math.prod(values.shape[1:-1]), values.shape[-1] * packed), x.dtype)
    y = x @ one.T
    return y.reshape(len(x), 2, -1)[:, 0] if function == "gate_up" else y


def traced(function: Any, *args: Any) -> float:
    """FLOP of the products of a function of abstract arguments."""
    with pallas_kernels.stand_in(_kernel):
        return _count(jax.make_jaxpr(lambda *args: function(*args))(*args).jaxpr)


def _count(jaxpr: Any) -> float:
    found = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            depth = math.prod(shape[axis] for axis in contract)
            found += 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)
        bodies = [_count(body) for body in jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "cond":
            found += max(bodies)
        elif eqn.primitive.name == "scan":
            found += eqn.params["length"] * sum(bodies)
        else:
            assert eqn.primitive.name != "while" or not any(bodies), "products in an open loop"
            found += sum(bodies)
    return found


def compiled(function: Any, *args: Any) -> float:
    """FLOP of the products in what XLA compiled."""
    with pallas_kernels.stand_in(_kernel):
        text = jax.jit(lambda *args: function(*args)).lower(*args).compile().as_text()
    assert text is not None
    return hlo.products(text)
