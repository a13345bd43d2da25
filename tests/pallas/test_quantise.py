"""Activations through e4m3: every implementation, and the code of every thread of the kernel, give
the reference's bits."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.model.compile import compiler_options
from pallas_kernels import formats, ptx, quantise, registers, target
from pallas_kernels.cases import tagged
from pallas_kernels.quantise import hopper, shapes, threads
from tests.pallas import emulate

BF16 = ml_dtypes.bfloat16
NAMES = [i.name for i in quantise.IMPLEMENTATIONS if not i.misfit(target(), i.name)]


def check_bits(got, want):
    """The same bits, but for those of a NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype
    kind = f"u{got.itemsize}"
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(kind)[~nan], want.view(kind)[~nan])


def reference(x):
    # With XLA:CPU's own options a maximum may lose a NaN.
    call = jax.jit(formats.round_trip_activations, compiler_options=compiler_options())
    return call(jnp.asarray(x))


def small(function):
    return [c for c in tagged(shapes.CASES, "test") if c.function == function]


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("case", small("round_trip"), ids=lambda case: case.name)
def test_bits_of_the_reference(case, implementation):
    (x,) = case.build(np.random.default_rng())
    call = functools.partial(quantise.round_trip, implementation=implementation)
    try:
        got = jax.jit(call)(jnp.asarray(x))
    except NotImplementedError as why:
        pytest.skip(str(why))
    check_bits(got, reference(x))


def special(k):
    """Rows [_, k] in bf16: every finite value of the format, each scale's limit, its steps and
    their middles, and groups with zeros of both signs, NaN and infinities among others (but no
    subnormal numbers with a NaN, for a CPU takes them for zero)."""
    # By the bits of the exponent: numpy warns where it asks an old ml_dtypes whether NaN is finite.
    bits = np.arange(1 << 16, dtype=np.uint16)
    every = bits[bits & 0x7F80 != 0x7F80].view(BF16)
    rng = np.random.default_rng(7)
    steps = np.linspace(-1, 1, 257)[:, None] * 448 * 2.0 ** np.arange(-30, 120)
    # A scale shows in what is subnormal under it: largest values below, at and above its limit.
    edges = rng.uniform(-(2.0**-6), 2.0**-6, (3, 120, 32))
    edges[..., 0] = np.array([446, 448, 450])[:, None]
    edges *= 2.0 ** np.arange(-20, 100)[:, None]
    mixed = rng.standard_normal((64, 32)) * 2.0 ** rng.integers(-100, 120, (64, 1))
    mixed[::4, ::2] = 0
    mixed[1::4, ::3] = -0.0
    mixed[2::8, 5], mixed[3::8, 7], mixed[6::8, 8], mixed[7::8, 31] = np.nan, np.inf, -np.inf, 0
    mixed[7::8, 3] = np.nan
    values = [edges, every, steps.T, mixed, np.zeros(64)]
    flat = np.concatenate([x.astype(BF16).reshape(-1) for x in values])
    return np.pad(flat, (0, -flat.size % k)).reshape(-1, k)


def emulated(monkeypatch, x, source, kind):
    """hopper.round_trip with every thread's code run in numpy."""
    rows, k = len(x if source is None else source), x.shape[1]
    per_row = k // hopper.LINE
    memory = emulate.Memory()
    refs = [memory.place(x), memory.place(np.full((rows, k), np.nan, BF16))]
    refs += [] if source is None else [memory.place(source)]
    options = dict(lines=rows * per_row, per_row=per_row, fp4=kind == "fp4")
    with emulate.emulated(monkeypatch, memory, ptx, hopper, threads):
        for block in range(-(-rows * per_row // hopper.LINES)):
            number = np.full(emulate.THREADS, block, np.uint32)
            hopper.one_block(number, *refs, **options)
    return memory.read(refs[1])


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_kernel_at_values_of_every_size(kind, monkeypatch):
    x = special(256)
    want = registers.order_columns(reference(x), kind).reshape(x.shape)
    check_bits(emulated(monkeypatch, x, None, kind), want)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.parametrize(("rows", "k"), [(1, 128), (7, 384), (33, 128), (16, 1280)])
def test_kernel_at_odd_shapes_and_with_gathered_rows(rows, k, kind, monkeypatch):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, k)).astype(BF16)
    for source in (None, rng.integers(0, rows, 2 * rows + 1).astype(np.int32)):
        rounded = reference(x if source is None else x[source])
        want = np.asarray(registers.order_columns(rounded, kind)).reshape(-1, k)
        check_bits(emulated(monkeypatch, x, source, kind), want)


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((4, 128), jnp.float32, "rows are float32, the kernel takes bfloat16"),
        ((4, 96), jnp.bfloat16, "K = 96 is not a multiple of 128"),
        ((0, 128), jnp.bfloat16, "no rows"),
    ],
)
def test_what_the_kernel_declines(shape, dtype, why):
    with pytest.raises(NotImplementedError, match=why):
        hopper.round_trip(jnp.zeros(shape, dtype))
