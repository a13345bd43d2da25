"""The RMS norm and the way through e4m3 in one kernel: every thread's code gives the reference's
norm but for the last bit where squares are added in another order, and of that the reference's
round trip to the bit."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.model.compile import compiler_options
from deepinfer_jax.model.norm import rms_norm
from pallas_kernels import ptx, quantise, target
from pallas_kernels.cases import tagged
from pallas_kernels.quantise import norm, shapes, threads
from pallas_kernels.quantise.shapes import EPS
from tests.pallas import emulate
from tests.pallas.test_quantise import check_bits, reference

BF16 = ml_dtypes.bfloat16
NAMES = [i.name for i in quantise.IMPLEMENTATIONS if not i.misfit(target(), i.name)]
CASES = [case for case in tagged(shapes.CASES, "test") if case.function == "normed"]


def composed(parts, weight, dtype):
    """The norm as the model has it, of the sum of the parts."""
    call = jax.jit(functools.partial(rms_norm, eps=EPS), compiler_options=compiler_options())
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return call(jnp.asarray(total.astype(dtype)), jnp.asarray(weight))


def check_near(got, want):
    """Neighbours at most, and those are rare."""
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_array_equal(got == 0, want == 0)
    np.testing.assert_allclose(got, want, rtol=2.0**-7)
    assert np.mean(got != want) <= 0.02


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_composition(case, implementation):
    parts, weight = case.build(np.random.default_rng())
    options = case.keywords()
    call = functools.partial(quantise.normed, implementation=implementation, **options)
    try:
        got = jax.jit(call, compiler_options=compiler_options())(parts, weight)
    except NotImplementedError as why:
        pytest.skip(str(why))
    want = composed(parts, weight, options["dtype"])
    if implementation == "reference":
        check_bits(got[0], want)
    check_near(got[0], want)
    check_bits(got[1], reference(got[0]))


def emulated(monkeypatch, parts, weight):
    """norm.normed with every thread's code run in numpy."""
    count, rows, k = parts.shape
    memory = emulate.Memory()
    empty = np.full((rows, k), np.nan, BF16)
    scratch = np.full(64, 0x7FC00000, np.int32)
    refs = [memory.place(x) for x in (parts, weight, empty, empty, scratch)]
    options = dict(count=count, rows=rows, k=k, wide=parts.dtype == np.float32, eps=EPS)
    with emulate.emulated(monkeypatch, memory, ptx, norm, threads):
        for row in range(rows):
            norm.one_row(np.full(emulate.THREADS, row, np.uint32), *refs, **options)
    return memory.read(refs[2]), memory.read(refs[3])


@pytest.mark.parametrize(
    ("count", "rows", "k", "part"),
    [
        (1, 1, 128, BF16),
        (1, 3, 5120, BF16),
        (10, 2, 1280, np.float32),
        (1, 2, 1280, np.float32),
        (2, 3, 1152, np.float32),
        (3, 5, 384, np.float32),
    ],
)
def test_kernel(count, rows, k, part, monkeypatch):
    rng = np.random.default_rng(k + count)
    sizes = np.exp2(rng.integers(-40, 40, (rows, 1)))
    parts = (rng.standard_normal((count, rows, k)) * sizes).astype(part)
    if count > 2:  # large ones that cancel: another order of the sum would show
        parts[1] += np.float32(1e5) * parts[0]
        parts[2] -= parts[1]
    weight = rng.standard_normal(k).astype(BF16)
    normed, rounded = emulated(monkeypatch, parts, weight)
    check_near(normed, composed(parts, weight, BF16))
    check_bits(rounded, reference(normed))


def test_kernel_at_rows_of_zeros_and_of_values_that_are_no_numbers(monkeypatch):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((6, 256)).astype(BF16)
    x[0], x[1], x[2], x[3, 7], x[4, 250] = 0, -0.0, 2.0**-60, np.nan, np.inf
    weight = rng.standard_normal(256).astype(BF16)
    with np.errstate(divide="ignore", invalid="ignore"):
        normed, rounded = emulated(monkeypatch, x[None], weight)
    want = np.asarray(composed(x[None], weight, BF16))
    np.testing.assert_array_equal(np.isnan(normed), np.isnan(want))
    check_bits(normed[:2], want[:2])
    check_near(normed[[2, 5]], want[[2, 5]])
    check_bits(rounded, reference(normed))


@pytest.mark.parametrize(
    ("shape", "part", "dtype", "why"),
    [
        ((1, 4, 128), jnp.float32, jnp.float32, "rows are float32 and the weight float32, the"),
        ((2, 4, 128), jnp.bfloat16, jnp.bfloat16, "2 parts are bfloat16, expected float32, or one"),
        ((1, 4, 96), jnp.bfloat16, jnp.bfloat16, "K = 96 is not a multiple of 128 up to 8192"),
        ((1, 4, 8320), jnp.bfloat16, jnp.bfloat16, "K = 8320 is not a multiple of 128 up to"),
        ((1, 0, 128), jnp.bfloat16, jnp.bfloat16, "no rows"),
    ],
)
def test_what_the_kernel_declines(shape, part, dtype, why):
    parts, weight = jnp.zeros(shape, part), jnp.zeros(shape[-1], dtype)
    with pytest.raises(NotImplementedError, match=why):
        norm.normed(parts, weight, eps=EPS, dtype=dtype)
