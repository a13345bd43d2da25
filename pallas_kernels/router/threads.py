"""Per-thread code of the router's kernel.

A lane keeps every 32nd score of its warp's row as an integer in the same order as the float (the
sign bit kept, the others of a negative one turned over). A round finds the largest, the lowest id
that has it, and takes it out.
"""

from typing import Any

from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir.dialects import arith

from pallas_kernels import ptx as t
from pallas_kernels.ptx import c, equal, less, ptx

plgpu: Any = mosaic_gpu  # its decorators are beyond the type checker

LEAST, NONE = -(2**31), 2**31 - 1
ADD = "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; add.f32 a, a, b; mov.b32 $0, a; }"  # rounded


def _lowest(a, b):
    return arith.select(less(a, b), a, b)


def _highest(a, b):
    return arith.select(less(a, b), b, a)


def _of_warp(kind: str, value):
    """max or min over the lanes of a warp, for each of them."""
    return ptx(f"redux.sync.{kind}.s32 $0, $1, 0xffffffff;", value, effects=True)


def choose(block, score, bias, chosen, taken, *routes, rows: int, experts: int, k: int):
    """The rows 4 block .. 4 block + 3: score [rows experts], bias [experts], routes [rows k] if
    given; chosen and taken [rows k]."""

    @plgpu.inline_mgpu(arg_types=(t.SCALAR, *(plgpu.RefType(),) * (4 + len(routes))))
    def run(ctx, block, score, bias, chosen, taken, *routes):
        del ctx
        score, bias = t.address(score), t.address(bias)
        thread = t.thread()
        lane, warp = arith.andi(thread, c(31)), arith.shrui(thread, c(5))
        row = arith.addi(arith.shli(t.number(block), c(2)), warp)
        real = less(row, c(rows))
        row = arith.select(real, row, c(0))
        first, base = arith.muli(row, c(k)), arith.muli(row, c(experts))
        ids = [arith.addi(lane, c(32 * i)) for i in range(-(-experts // 32))]
        inside = [less(number, c(experts)) for number in ids]
        loaded = []
        for number, here in zip(ids, inside, strict=True):
            loaded.append(t.load_where(here, arith.addi(base, number), score))
        values = []
        for number, here, value in zip(ids, inside, loaded, strict=True):
            more = t.load_where(here, number, bias)
            bits = ptx(ADD, value, more)
            turned = arith.andi(arith.shrsi(bits, c(31)), c(NONE))
            values.append(arith.select(here, arith.xori(bits, turned), c(LEAST)))
        best = []
        for _ in range(k):
            top = values[0]
            for value in values[1:]:
                top = _highest(top, value)
            top, lowest = _of_warp("max", top), c(NONE)
            for number, value in zip(reversed(ids), reversed(values), strict=True):
                lowest = arith.select(equal(value, top), number, lowest)
            best.append(_of_warp("min", lowest))
            values = [
                arith.select(equal(number, best[-1]), c(LEAST), value)
                for number, value in zip(ids, values, strict=True)
            ]
        if routes:
            source = t.address(routes[0])
            given = [t.load_if("b32", arith.addi(first, c(i)), 4, source) for i in range(k)]
            own = less(given[0], c(0))
            best = [arith.select(own, a, b) for a, b in zip(best, given, strict=True)]
        _ascend(best)
        mine = best[0]
        for i in range(1, k):
            mine = arith.select(equal(lane, c(i)), best[i], mine)
        found = t.load_if("b32", arith.addi(base, mine), 4, score)
        to, write = arith.addi(first, lane), arith.andi(real, less(lane, c(k)))
        for ref, word in ((chosen, mine), (taken, found)):
            t.store_word(to, t.address(ref), word, write)

    run(block, score, bias, chosen, taken, *routes)


def _ascend(values: list) -> None:
    """Puts a few words in order: neighbours exchanged in as many rounds."""
    for number in range(len(values)):
        for i in range(number % 2, len(values) - 1, 2):
            low, high = values[i], values[i + 1]
            values[i], values[i + 1] = _lowest(low, high), _highest(low, high)
