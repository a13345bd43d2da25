"""What a thread does to its channels of a row: four neighbouring threads serve a line of 128.

Thread p of the four holds channels 8 p to 8 p + 7 of each of the line's four groups of 32, as four
times four words of two bf16, so a group's largest value is found by two exchanges within the four,
and loads and stores are 16 bytes. A scale is a power of two, hence dividing by it is multiplying by
its reciprocal.

FP4 weights want their rows in another order of K (registers.order_columns): there a thread's 32
values are neighbours, so it can store them in that order, again 16 bytes at a time.
"""

from typing import Any

from pallas_kernels import ptx as t

LINE = 128
GROUPS = 4
"""Groups of 32 channels in a line, and 16-byte pieces in a group."""


def rounded(groups: list[Any]) -> list[Any]:
    """A thread's words, four of each group, through e4m3 and back; all of a warp take part."""
    return [t.ptx(_ROUND, *words, outputs=4, effects=True) for words in groups]


def store(groups: list[Any], line, piece, base, *, fp4: bool) -> None:
    """Writes a thread's words to its line of GMEM bf16 [_, 128].

    Args:
        line, piece: int32; number of the line, of the thread among its four.
        base: address of the first line.
        fp4: in the order of FP4 weights.
    """
    stride, step = (64, 16) if fp4 else (16, 64)
    base = t.wide(line, 2 * LINE, t.wide(piece, stride, base))
    for i, words in enumerate(_fp4_order(groups) if fp4 else groups):
        t.do(f"st.global.v4.b32 [$0 + {step * i}], {{$1, $2, $3, $4}};", base, *words)


def _fp4_order(groups: list[Any]) -> list[list[Any]]:
    """Words of a thread's channels as 8 c + 2 group + h: channel 4 h + c of its piece of a group,
    hence the same half of two of its words."""
    select = ("0x5410", "0x7632")
    return [
        [t.ptx(f"prmt.b32 $0, $1, $2, {select[c % 2]};", g[c // 2], g[2 + c // 2]) for g in groups]
        for c in range(4)
    ]


def _round_text() -> str:
    """PTX of eight bf16 in words $4..$7, a quarter of a group, to $0..$3.

    Magnitudes of bf16 and of positive float32 are ordered as their bits are, NaN last, as the
    reference's maxima have it.
    """
    text = "{ .reg .b32 m, n, s, r, a, b, h, w<4>; .reg .b16 q, l, u; .reg .pred p;"
    text += " and.b32 m, $4, 0x7fff7fff;"
    for word in (5, 6, 7):
        text += f" and.b32 n, ${word}, 0x7fff7fff; max.u16x2 m, m, n;"
    for distance in (1, 2):
        text += f" shfl.sync.bfly.b32 n, m, {distance}, 31, 0xffffffff; max.u16x2 m, m, n;"
    text += " shl.b32 n, m, 16; and.b32 m, m, 0xffff0000; max.u32 m, m, n;"
    # max(amax, 1e-4) / 448, then the power of two that is no smaller.
    text += " max.u32 m, m, 0x38d1b717; mov.b32 n, 0x3b124925; mul.rn.f32 m, m, n;"
    text += " add.u32 m, m, 0x7fffff; and.b32 s, m, 0xff800000;"
    # Its reciprocal. An infinite maximum has an infinite scale and a NaN has -0, as the reference
    # has them: 0 and -inf.
    text += " setp.ge.u32 p, s, 0x7f800000; xor.b32 n, s, 0x7f800000;"
    text += " sub.u32 r, 0x7f000000, s; selp.b32 r, n, r, p;"
    for i in range(4):
        text += f" shl.b32 a, ${4 + i}, 16; and.b32 b, ${4 + i}, 0xffff0000;"
        text += " mul.rn.f32 a, a, r; mul.rn.f32 b, b, r;"
        text += " cvt.rn.satfinite.e4m3x2.f32 q, b, a; cvt.rn.f16x2.e4m3x2 h, q;"
        text += " cvt.u16.u32 l, h; shr.u32 h, h, 16; cvt.u16.u32 u, h;"
        text += " cvt.f32.f16 a, l; cvt.f32.f16 b, u; mul.rn.f32 a, a, s; mul.rn.f32 b, b, s;"
        text += f" cvt.rn.bf16x2.f32 w{i}, b, a;"
    return text + "".join(f" mov.b32 ${i}, w{i};" for i in range(4)) + " }"


_ROUND = _round_text()
