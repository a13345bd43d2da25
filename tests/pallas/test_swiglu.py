"""SwiGLU on the way through e4m3: the reference against numpy, and the code of every thread of the
kernel against the reference."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.model.compile import compiler_options
from pallas_kernels import ptx, quantise, row_matmul, target
from pallas_kernels.cases import tagged
from pallas_kernels.quantise import gated, shapes, threads
from tests.pallas import emulate
from tests.pallas.test_quantise import check_bits, small

BF16 = ml_dtypes.bfloat16
NAMES = [i.name for i in quantise.IMPLEMENTATIONS if not i.misfit(target(), i.name)]
OPTIONS = dict(limit=10.0, dtype=BF16, act_quant=True)


def added(parts):
    """Float32 parts, one after the other."""
    return functools.reduce(np.add, parts.astype(np.float32))


def reference(gate, up, **options):
    # With XLA:CPU's own options a maximum may lose a NaN.
    call = functools.partial(quantise.swiglu, implementation="reference", **options)
    return np.asarray(jax.jit(call, compiler_options=compiler_options())(gate, up))


def check_near(got, want):
    """Equal but for neighbours in a few places."""
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = got.astype(np.float64), want.astype(np.float64)
    assert np.linalg.norm(got - want) <= shapes.SWIGLU_TOLERANCE * np.linalg.norm(want)
    assert (got != want).mean() <= 1e-3 + 1 / got.size
    assert (np.abs(got - want) <= np.maximum(np.abs(got), np.abs(want)) / 8 + 2.0**-30).all()


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("case", small("swiglu"), ids=lambda case: case.name)
def test_against_numpy(case, implementation):
    gate, up = args = case.build(np.random.default_rng())
    options = case.keywords()
    try:
        got = jax.jit(functools.partial(quantise.swiglu, implementation=implementation, **options))(
            *args
        )
    except NotImplementedError as why:
        pytest.skip(str(why))
    a, b = (added(x).astype(options["dtype"]).astype(np.float64) for x in (gate, up))
    a, b = np.minimum(a, 10), np.clip(b, -10, 10)
    hidden = (a / (1 + np.exp(-a)) * b).astype(options["dtype"])
    if options["act_quant"]:
        hidden = np.asarray(quantise.round_trip(jnp.asarray(hidden), implementation="reference"))
    check_near(np.asarray(got), hidden)


def emulated(monkeypatch, gate, up, limit=10.0):
    """gated.swiglu with every thread's code run in numpy."""
    parts, rows, n = gate.shape
    groups = rows * n // 32
    memory = emulate.Memory()
    refs = [memory.place(x) for x in (gate, up, np.full((rows, n), np.nan, BF16))]
    options = dict(groups=groups, parts=parts, wide=gate.dtype == np.float32, limit=limit)
    with emulate.emulated(monkeypatch, memory, ptx, gated, threads):
        for block in range(-(-groups // gated.GROUPS)):
            gated.one_block(np.full(emulate.THREADS, block, np.uint32), *refs, **options)
    return memory.read(refs[2])


@pytest.mark.parametrize(
    ("parts", "rows", "n", "dtype"),
    [
        (1, 1, 32, BF16),
        (1, 33, 96, BF16),
        (1, 7, 64, np.float32),
        (3, 37, 160, np.float32),
        (10, 4, 128, np.float32),
        (23, 3, 64, np.float32),
    ],
)
def test_kernel_adds_parts_in_order(parts, rows, n, dtype, monkeypatch):
    rng = np.random.default_rng(parts)
    # Parts of very different size: another order gives other sums.
    size = np.exp2(rng.integers(-12, 4, (2, parts, 1, n)))
    gate, up = (rng.standard_normal((2, parts, rows, n)) * size).astype(dtype)
    check_near(emulated(monkeypatch, gate, up), reference(gate, up, **OPTIONS))


@pytest.mark.parametrize("limit", [0.75, 10.0])
def test_kernel_at_the_bounds(limit, monkeypatch):
    """Both bounds of up, the one of gate, values past all of them, zeros of both signs, NaN and
    infinities: every pair."""
    edges = np.array([limit, 2 * limit, 1e30, np.inf, 0.0, 1e-30, 0.3 * limit])
    values = np.concatenate([edges, -edges, [np.nan, -90.0]]).astype(BF16)
    gate, up = (x.reshape(1, -1, 1) for x in np.meshgrid(values, values))
    # A group each: a NaN would be its group's largest value.
    gate, up = (np.concatenate([x] + [np.full_like(x, 0.5)] * 31, -1) for x in (gate, up))
    got = emulated(monkeypatch, gate, up, limit)
    want = reference(gate, up, limit=limit, dtype=BF16, act_quant=True)
    finite = np.isfinite(want.astype(np.float32)).all(-1)
    check_bits(got[~finite], want[~finite])
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(want[finite]))
    check_near(got[finite], want[finite])


F32, HALF = jnp.float32, jnp.bfloat16


@pytest.mark.parametrize(
    ("gate", "up", "changed", "why"),
    [
        ((1, 4, 48, HALF), None, {}, "48 channels are not a multiple of 32"),
        ((1, 0, 64, HALF), None, {}, "no rows"),
        ((2, 4, 64, HALF), None, {}, "2 parts of bfloat16, expected float32"),
        ((1, 4, 64, F32), (1, 4, 64, HALF), {}, r"gate is float32\[1, 4, 64\], up is bfloat16\["),
        ((1, 4, 64, F32), None, {"dtype": F32}, "the kernel makes bfloat16 rows that went through"),
        ((1, 4, 64, F32), None, {"act_quant": False}, "the kernel makes bfloat16 rows that went"),
    ],
)
def test_what_the_kernel_declines(gate, up, changed, why):
    args = [jnp.zeros(x[:-1], x[-1]) for x in (gate, up or gate)]
    with pytest.raises(NotImplementedError, match=why):
        gated.swiglu(*args, **{**OPTIONS, **changed})


def test_one_part_keeps_the_dtype_of_its_rows():
    """A product of one part is not stored wider than it is rounded to at once."""
    x, w = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((8, 64), jnp.bfloat16)
    for name in ("reference", "xla"):
        call = functools.partial(row_matmul.partial_products, x, w, implementation=name)
        assert call(out_dtype=jnp.bfloat16).dtype == jnp.bfloat16
        assert call().dtype == jnp.float32


def test_released_cases_have_the_parts_that_products_have():
    from pallas_kernels.row_matmul import plans

    for case in tagged(shapes.CASES, "bench"):
        if case.function == "swiglu":
            parts, rows, n = case.abstract()[0].shape
            assert plans.best("fp8", rows, 2 * n, 5120)[0] == parts
