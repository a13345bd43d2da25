"""Words of 128 threads as the numbers in them, and back: what emulated instructions compute with.

A word is a uint32 array [128]; a pair is the two 16-bit halves of each, low half first.
"""

import re

import ml_dtypes
import numpy as np

THREADS = 128
BF16 = ml_dtypes.bfloat16


def halves(word) -> tuple[np.ndarray, np.ndarray]:
    """The two bfloat16 of a word in float32, low half first."""
    pair = np.ascontiguousarray(word.astype(np.uint32)).view(BF16).astype(np.float32)
    return pair[0::2], pair[1::2]


def join(low, high) -> np.ndarray:
    """Two float32 arrays rounded to bfloat16 pairs."""
    return np.stack([low, high], -1).astype(BF16).view(np.uint32)[:, 0]


def compare(op: str, a, b) -> np.ndarray:
    """The comparison named in an opcode."""
    if ".s32" in op:
        a, b = (x.astype(np.uint32).view(np.int32) for x in (a, b))
    name = re.search(r"\.(ge|gt|lt|le|eq|ne)", op).group(1)
    return {
        "ge": np.greater_equal,
        "gt": np.greater,
        "lt": np.less,
        "le": np.less_equal,
        "eq": np.equal,
        "ne": np.not_equal,
    }[name](a, b)


def permute(a, b, selector) -> np.ndarray:
    """prmt: bytes 0..3 of a and 4..7 of b."""
    source = np.stack([a, b], -1).astype(np.uint32).view(np.uint8)
    out = np.zeros((THREADS, 4), np.uint8)
    for i in range(4):
        pick = (selector >> (4 * i)) & 7
        out[:, i] = source[np.arange(THREADS), pick]
    return out.view(np.uint32)[:, 0]


@np.errstate(over="ignore", invalid="ignore")
def times(a, b) -> np.ndarray:
    """The product, with what IEEE has for infinities and overflow."""
    return a * b


def e4m3_pair(low, high) -> np.ndarray:
    """Two float32 arrays, limited to the format's range, as e4m3 in the low half of a word."""
    pair = np.clip(np.stack([low, high], -1), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return pair.view(np.uint16)[:, 0].astype(np.uint32)


def f16_pair(word) -> np.ndarray:
    """The two e4m3 in the low half of a word as float16."""
    pair = word.astype(np.uint16).view(ml_dtypes.float8_e4m3fn).reshape(-1, 2)
    return pair.astype(np.float16).view(np.uint32)[:, 0]


def as_float(x) -> np.ndarray:
    """A register read as float32."""
    return x.view(np.float32) if x.dtype == np.uint32 else x.astype(np.float32)


@np.errstate(over="ignore", under="ignore")
def power(x) -> np.ndarray:
    """2^x, of more accuracy than the instruction has."""
    return np.exp2(x.astype(np.float64)).astype(np.float32)


FLOATS = {
    "add.rn.f32": np.add,
    "fma.rn.f32": lambda a, b, c: np.float64(a) * b + c,
    "div.full.f32": np.divide,
    "div.rn.f32": np.divide,
    "max.f32": np.fmax,
    "abs.f32": np.abs,
    "sqrt.rn.f32": np.sqrt,
    "ex2.approx.f32": np.exp2,
}
"""What an instruction computes of float32; NaN, infinities and overflow as IEEE has them."""


@np.errstate(all="ignore")
def of_floats(do, words: list) -> np.ndarray:
    """What `do` makes of words read as float32, rounded to float32, as a word."""
    return np.float32(do(*map(as_float, words))).view(np.uint32)
