"""What the kernels of ``pallas_kernels`` must do at least, from their argument shapes.

A program is priced as its kernels are meant to run, not as the portable reference happens to: while
it is traced each kernel call becomes one opaque equation (``Costs`` is the stand-in) that carries
its products and the bytes it has to read.

    mla_attention   4 r h d (w + k) FLOP;        each row reads its own w window and k selected rows
    grouped_gemm    2 n K N FLOP of the n rows in use;     reads the experts that n rows are likely
                    to hit, E (1 - (1 - 1/E)^n)
    index_topk      2 g w h d T FLOP;            reads the T keys of each sequence once; inside the
                    candidate pool a row scores no more than the pool has, and a sequence reads no
                    more than the pools of its rows
    row_matmul      2 r K N FLOP;                reads the weight once
    hyper_connections, quantise, grouping, router    as their references: no products

Products run in the type of the rows; expert products in fp8 where rows are quantised.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouping import reference as grouping
from pallas_kernels.hyper_connections import reference as hyper_connections
from pallas_kernels.quantise import reference as quantise
from pallas_kernels.router import reference as router

NAME = "priced_kernel_"
REFERENCES = {
    "hyper_connections": hyper_connections,
    "quantise": quantise,
    "grouping": grouping,
    "router": router,
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """flop: FLOP by operand type. read: bytes of each flattened argument, in order."""

    name: str
    flop: dict[str, float]
    read: tuple[float, ...]


@dataclasses.dataclass
class Costs:
    """Stand-in for ``pallas_kernels.stand_in``; ``found`` lists the calls met while tracing.

    used: share of the rows handed to grouped_gemm that belong to an expert, averaged over steps
    (buffers are sized for more rows than usually come).
    """

    used: float = 1.0
    found: list[Cost] = dataclasses.field(default_factory=list)

    def __call__(self, op: str, function: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if op in REFERENCES:
            return getattr(REFERENCES[op], function)(*args, **kwargs)
        price = getattr(self, f"_{op}", None)
        if price is None:
            raise NotImplementedError(f"lab: no cost is declared for kernel {op}.{function}")
        flop, read, out = price(function, args, kwargs)
        leaves = jax.tree.leaves(args)
        self.found.append(Cost(f"{op}.{function}", flop, tuple(read)))

        def opaque(*_: Any) -> Any:
            return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), out)

        opaque.__name__ = f"{NAME}{len(self.found) - 1}"
        return jax.jit(opaque)(*leaves)

    def _mla_attention(self, function, args, kwargs):
        q, window, window_index, selected, selected_index, sink = args
        rows, heads, dim = q.shape
        keys, read = 0, [_bytes(q)]
        for source, index in ((window, window_index), (selected, selected_index)):
            if source is None:
                continue
            keys += index.shape[1]
            for leaf in jax.tree.leaves(source):
                read.append(min(_bytes(leaf), index.size * _bytes(leaf) / leaf.shape[0]))
            read.append(_bytes(index))
        read.append(_bytes(sink))
        flop = 4.0 * rows * heads * dim * keys
        return {_kind(q): flop}, read, jax.ShapeDtypeStruct(q.shape, q.dtype)

    def _grouped_gemm(self, function, args, kwargs):
        x, values, scales, sizes, *rest = args  # of gate_up: routing weights, and source or None
        source = rest[1] if len(rest) > 1 else None
        count = x.shape[0] if source is None else source.shape[0]
        rows, experts = count * self.used, values.shape[0]
        inner = math.prod(values.shape[1:-1])
        hit = 1 - (1 - 1 / experts) ** rows
        read = [min(_bytes(x), rows * _bytes(x) / x.shape[0]), _bytes(values) * hit]
        read += [_bytes(scales) * hit] if scales is not None else []
        read += [_bytes(leaf) for leaf in (sizes, *rest) if leaf is not None]
        kind = "fp8" if kwargs.get("act_quant") and values.dtype.itemsize == 1 else _kind(x)
        out = inner // 2 if function == "gate_up" else inner
        shape = jax.ShapeDtypeStruct((count, out), x.dtype)
        return {kind: 2.0 * rows * x.shape[1] * inner}, read, shape

    def _index_topk(self, function, args, kwargs):
        q, weights, keys, visible, candidates = args
        groups, width, heads, dim = q.shape
        entries = (keys[2] if isinstance(keys, tuple) else keys).shape[1]
        scored = entries if candidates is None else min(entries, math.prod(kwargs["candidates"]))
        part = min(1.0, width * scored / max(entries, 1))
        read = [_bytes(q), _bytes(weights)]
        if isinstance(keys, tuple):
            share = min(1.0, groups * entries * part / keys[0].shape[0])
            read += [_bytes(keys[0]) * share, _bytes(keys[1]) * share, _bytes(keys[2]) * part]
        else:
            read.append(_bytes(keys) * part)
        read.append(_bytes(visible))
        read += [_bytes(candidates)] if candidates is not None else []
        chosen = jax.ShapeDtypeStruct((groups, width, min(kwargs["k"], entries)), jnp.int32)
        flop = {_kind(q): 2.0 * groups * width * heads * dim * scored}
        if kwargs.get("pool") is None:
            return flop, read, chosen
        blocks = (groups, width, -(-entries // kwargs["pool"][0]))
        return flop, read, (chosen, jax.ShapeDtypeStruct(blocks, jnp.bool_))

    def _row_matmul(self, function, args, kwargs):
        if function == "partial_products_of":
            return self._several(args, kwargs)
        x, weight, scales = args
        groups = x.shape[1:-1]  # matmul_groups: each has its own rows of the weight
        shape = (x.shape[0], *groups, weight.shape[0] // math.prod(groups))
        if function == "partial_products":  # priced as one part
            shape = (1, *shape)
        out = jax.ShapeDtypeStruct(shape, jnp.dtype(kwargs.get("out_dtype", jnp.float32)))
        read = [_bytes(leaf) for leaf in (x, weight, scales) if leaf is not None]
        return {_kind(x): 2.0 * x.shape[0] * weight.size}, read, out

    def _several(self, args, kwargs):
        x, weights = args
        each = [self._row_matmul("partial_products", (x, *w), kwargs) for w in weights]
        flop = {_kind(x): sum(found[0][_kind(x)] for found in each)}
        read = [_bytes(x), *(b for found in each for b in found[1][1:])]
        return flop, read, [found[2] for found in each]


def _kind(x: Any) -> str:
    return {1: "fp8", 2: "bf16"}.get(np.dtype(x.dtype).itemsize, "f32")


def _bytes(x: Any) -> float:
    return float(x.size * np.dtype(x.dtype).itemsize)
