"""Per-thread code of the router's kernel.

A lane adds the parts of every 32nd logit of its warp's row, and keeps each biased score as an
integer in the same order as the float (the sign bit kept, the others of a negative one turned
over). A round finds the largest, the lowest id that has it, and takes it out. Then lane i computes
the score of expert i of the row again, from the same numbers in the same order.

Softplus is max(x, 0) + log1p(u), u = exp(-|x|). ex2.approx gives u within 2 ulp and what rounding
|x| log2(e) costs, |x| 2^-24; log1p(u) = 2 artanh(u / (2 + u)) is a series in numbers up to 1/3
whose rest is below 2^-25, so small u lose nothing. Division and square root of the weights round
as IEEE has it. A score is within 2^-22 + |min(x, 0)| 2^-24 of its value, relative.
"""

import struct
from typing import Any

from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir.dialects import arith

from pallas_kernels import ptx as t
from pallas_kernels.ptx import c, equal, less, ptx
from pallas_kernels.router import SUM_EPS

plgpu: Any = mosaic_gpu  # its decorators are beyond the type checker

READ = 128
"""Logits of a lane, in parts, whose loads are in flight at once."""
LEAST, NONE = -(2**31), 2**31 - 1
ADD = "add.rn.f32 $0, $1, $2;"


def _float(x: float) -> str:
    """A float32 as PTX writes it."""
    return "0f" + struct.pack(">f", x).hex().upper()


def _score(x):
    """sqrt(softplus(x)) of a word; NaN stays NaN."""
    series = "".join(f" fma.rn.f32 p, p, q, {_float(1 / n)};" for n in (11, 9, 7, 5, 3))
    text = (
        "{ .reg .b32 a, s, q, p;"
        f" abs.f32 a, $1; mul.rn.f32 a, a, {_float(-1.4426950408889634)};"
        f" ex2.approx.f32 a, a; add.rn.f32 s, a, {_float(2.0)}; div.full.f32 s, a, s;"
        f" mul.rn.f32 q, s, s; mov.b32 p, {_float(1 / 13)};{series}"
        " add.rn.f32 s, s, s; mul.rn.f32 q, q, s; fma.rn.f32 s, q, p, s;"
        f" max.f32 a, $1, {_float(0.0)}; add.rn.f32 s, a, s; sqrt.rn.f32 $0, s; }}"
    )
    return ptx(text, x)


def _lowest(a, b):
    return arith.select(less(a, b), a, b)


def _highest(a, b):
    return arith.select(less(a, b), b, a)


def _of_warp(kind: str, value):
    """max or min over the lanes of a warp, for each of them."""
    return ptx(f"redux.sync.{kind}.s32 $0, $1, 0xffffffff;", value, effects=True)


def _of_lane(value, lane: int):
    """The word of one lane of a warp, for each of them."""
    return ptx(f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;", value, effects=True)


def route(
    block, parts, bias, chosen, weight, *routes,
    count: int, rows: int, experts: int, k: int, scale: float,
):  # fmt: skip
    """The rows 4 block .. 4 block + 3: parts [count rows experts], bias [experts], routes [rows k]
    if given; chosen and weight [rows k]."""

    @plgpu.inline_mgpu(arg_types=(t.SCALAR, *(plgpu.RefType(),) * (4 + len(routes))))
    def run(ctx, block, parts, bias, chosen, weight, *routes):
        del ctx
        parts, bias = t.address(parts), t.address(bias)
        thread = t.thread()
        lane, warp = arith.andi(thread, c(31)), arith.shrui(thread, c(5))
        row = arith.addi(arith.shli(t.number(block), c(2)), warp)
        real = less(row, c(rows))
        row = arith.select(real, row, c(0))
        first, base = arith.muli(row, c(k)), arith.muli(row, c(experts))
        ids = [arith.addi(lane, c(32 * i)) for i in range(-(-experts // 32))]
        inside = [less(number, c(experts)) for number in ids]

        def loaded(here, number):
            """One logit's parts."""
            at = arith.addi(base, number)
            places = [arith.addi(at, c(part * rows * experts)) for part in range(count)]
            return [t.load_where(here, place, parts) for place in places]

        def score(words):
            total = words[0]
            for word in words[1:]:
                total = ptx(ADD, total, word)
            return _score(total)

        scores, together = [], max(1, READ // count)
        for start in range(0, len(ids), together):
            some = slice(start, start + together)
            found = [loaded(*pair) for pair in zip(inside[some], ids[some], strict=True)]
            scores += [score(words) for words in found]
        values = []
        for number, here, value in zip(ids, inside, scores, strict=True):
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
        own = score(loaded(less(lane, c(k)), mine))
        total = _of_lane(own, 0)
        for i in range(1, k):
            total = ptx(ADD, total, _of_lane(own, i))
        text = (
            f"{{ .reg .b32 a; add.rn.f32 a, $2, {_float(SUM_EPS)}; div.rn.f32 a, $1, a;"
            f" mul.rn.f32 $0, a, {_float(scale)}; }}"
        )
        scaled = ptx(text, own, total)
        to, write = arith.addi(first, lane), arith.andi(real, less(lane, c(k)))
        for ref, word in ((chosen, mine), (weight, scaled)):
            t.store_word(to, t.address(ref), word, write)

    run(block, parts, bias, chosen, weight, *routes)


def _ascend(values: list) -> None:
    """Puts a few words in order: neighbours exchanged in as many rounds."""
    for number in range(len(values)):
        for i in range(number % 2, len(values) - 1, 2):
            low, high = values[i], values[i + 1]
            values[i], values[i + 1] = _lowest(low, high), _highest(low, high)
