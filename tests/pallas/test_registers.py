"""What every thread of a warpgroup makes of a weight tile in shared memory, emulated in numpy."""

from types import SimpleNamespace

import jax
import jaxtyping
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import registers, terms
from pallas_kernels.row_matmul import blackwell
from tests.pallas import emulate

THREAD = np.arange(emulate.THREADS)


@pytest.fixture(autouse=True)
def values_instead_of_operations(monkeypatch):
    """What is emulated computes with arrays where its annotations have compiler values."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def swizzled(tile: np.ndarray, columns: int, swizzle: int) -> np.ndarray:
    """A [64, 64] tile as the copy leaves it: pieces of 8 rows, 16-byte chunks exchanged."""
    blocks = tile.reshape(8, 8, -1, columns).swapaxes(1, 2)
    lines = np.ascontiguousarray(blocks).view(np.uint8).reshape(-1, columns * tile.itemsize)
    place = np.arange(lines.size // 16) * 16
    turn = place >> 7 & swizzle // 16 - 1
    out = np.empty_like(lines).reshape(-1, 16)
    out[place // 16 ^ turn] = lines.reshape(-1, 16)
    return out.reshape(-1)


def operand(array) -> np.ndarray:
    """A left operand in the WGMMA layout as [64, 64] float64."""
    out = np.full((64, 64), np.nan)
    for group in range(8):
        for member in range(2):
            word = array.registers[0, group, 0, 0, member, 0, 0, 0, 0].astype(np.uint32)
            row = 16 * (THREAD // 32) + THREAD % 32 // 4 + 8 * member
            column = 8 * group + 2 * (THREAD % 4)
            pair = np.ascontiguousarray(word).view(ml_dtypes.bfloat16).reshape(-1, 2)
            out[row, column], out[row, column + 1] = pair[:, 0], pair[:, 1]
    return out


def test_float32_weights_are_three_exact_terms(monkeypatch):
    rng = np.random.default_rng()
    w = rng.standard_normal((64, 64)) * np.exp2(rng.integers(-60, 60, (64, 64)))
    w = w.astype(np.float32)
    w[0, :3] = 0.0, -0.0, 1.0
    memory = emulate.Memory()
    place = memory.place(swizzled(w, 32, 128))
    with emulate.emulated(monkeypatch, memory, registers, terms):
        found = terms.split(place, rows=registers.Rows(False, 64))
    parts = [operand(array) for array in found]
    np.testing.assert_array_equal(sum(parts), w.astype(np.float64))
    same = np.asarray(jax.jit(blackwell.terms)(w)).astype(np.float64)
    np.testing.assert_array_equal(np.stack(parts), same)


@pytest.mark.parametrize("blocks", [2, 1])
@pytest.mark.parametrize(("weights", "which"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_fp8_weights_take_the_scale_of_their_block(weights, which, blocks, monkeypatch):
    """The second block row of a tile may lie past the end of the scales: it takes the last one.
    Scales are those of the weight at hand."""
    rng = np.random.default_rng()
    codes = rng.integers(0, 256, (64, 64)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    pitch, column = 8, 6
    scales = rng.integers(110, 130, (weights, blocks, pitch)).astype(np.uint8)
    memory = emulate.Memory()
    tile, stored = memory.place(swizzled(codes, 64, 64)), [memory.place(x) for x in scales]
    scales = scales[which]
    number = [
        SimpleNamespace(registers=SimpleNamespace(item=np.full(128, x, np.uint32).copy))
        for x in (column, blocks - 1, which)
    ]
    with emulate.emulated(monkeypatch, memory, registers):
        found = registers.expand_fp8(
            tile,
            tuple(stored),
            (number[0], number[0]),
            None if blocks == 2 else number[1],
            number[2],
            rows=registers.Rows(False, 64),
            pitch=pitch,
        )
    factor = 2.0 ** (scales[:, column : column + 2].astype(float) - 127 - registers.SHIFT)
    factor = np.repeat(np.repeat(factor, 64 // blocks, 0), 32, 1)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * factor
    np.testing.assert_array_equal(operand(found), want)
