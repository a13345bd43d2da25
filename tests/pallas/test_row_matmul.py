"""The dense row product: float64 error, and with invariant=True the same bits for every number of
rows."""

import functools
import inspect
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import row_matmul, target
from pallas_kernels.blackwell import Plan
from pallas_kernels.grouped_gemm.shapes import weight
from pallas_kernels.row_matmul import blackwell, hopper, shapes

BF16 = ml_dtypes.bfloat16
NAMES = [i.name for i in row_matmul.IMPLEMENTATIONS if not i.misfit(target(), i.name)]


def inputs(rows, n, k, kind, dtype):
    rng = np.random.default_rng(zlib.crc32(f"{n} {k} {kind}".encode()))
    w, scales = weight(rng, (n, k), kind)
    return rng.standard_normal((rows, k), dtype=np.float32).astype(dtype), w, scales


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("rows", "n", "k", "kind", "dtype", "out"),
    [
        (5, 24, 320, "f32", np.float32, np.float32),
        (70, 48, 64, "bf16", BF16, BF16),
        (1, 64, 128, "fp8", BF16, BF16),
        (130, 40, 80, "fp8", BF16, np.float32),
        (33, 40, 80, "fp8", np.float32, np.float32),
        (0, 32, 32, "bf16", BF16, BF16),
    ],
)
def test_against_float64(rows, n, k, kind, dtype, out, invariant, implementation):
    x, w, scales = inputs(rows, n, k, kind, dtype)
    call = functools.partial(
        row_matmul.matmul, out_dtype=out, invariant=invariant, implementation=implementation
    )
    try:
        got = np.asarray(jax.jit(call)(x, w, scales))
    except NotImplementedError as why:
        pytest.skip(str(why))
    wide = np.asarray(w).astype(np.float64)
    if scales is not None:
        scale = 2.0 ** (np.asarray(scales).view(np.uint8).astype(np.float64) - 127)
        wide = wide * np.repeat(np.repeat(scale, 32, 0), 32, 1)[:n, :k]
    want = np.asarray(x).astype(np.float64) @ wide.T
    assert got.dtype == out and got.shape == (rows, n)
    tolerance = 1e-5 if out == np.float32 else 5e-3
    assert np.linalg.norm(got.astype(np.float64) - want) <= tolerance * np.linalg.norm(want)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("rows", "n", "k", "kind", "dtype"),
    [(5, 24, 320, "f32", np.float32), (70, 48, 64, "bf16", BF16), (3, 64, 128, "fp8", BF16)],
)
def test_partial_products_add_up_to_the_product(rows, n, k, kind, dtype, invariant, implementation):
    args = inputs(rows, n, k, kind, dtype)
    chosen = dict(invariant=invariant, implementation=implementation)
    try:
        parts = np.asarray(jax.jit(functools.partial(row_matmul.partial_products, **chosen))(*args))
    except NotImplementedError as why:
        pytest.skip(str(why))
    assert parts.dtype == np.float32 and parts.shape[1:] == (rows, n)
    whole = functools.partial(row_matmul.matmul, out_dtype=jnp.float32, **chosen)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    np.testing.assert_array_equal(total, np.asarray(jax.jit(whole)(*args)))


COUNTS = (1, 2, 6, 7, 31, 63, 64, 65, 100, 128, 200)


@pytest.mark.parametrize(
    ("n", "k", "kind", "dtype"),
    [
        (24, 20480, "f32", np.float32),
        (32, 32, "bf16", BF16),
        (96, 512, "bf16", BF16),
        (64, 640, "fp8", BF16),
        (48, 128, "f32", np.float32),
        (384, 512, "f32", np.float32),
    ],
)
def test_row_bits_do_not_depend_on_the_row_count(n, k, kind, dtype):
    check(n, k, kind, dtype, COUNTS)


@pytest.mark.slow
@pytest.mark.parametrize("k", [32, 64, 512, 1280, 5120, 20480])
@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("bf16", BF16), ("fp8", BF16)])
def test_row_bits_for_many_counts(k, kind, dtype):
    check(
        56,
        k,
        kind,
        dtype,
        (*COUNTS, 3, 5, 15, 17, 33, 127, 129, 255, 256, 300, 511, 512, 777, 1024, 1536, 2047, 2048),
    )


def check(n, k, kind, dtype, counts):
    x, w, scales = inputs(max(counts), n, k, kind, dtype)
    out = np.float32 if dtype == np.float32 else BF16
    call = jax.jit(functools.partial(row_matmul.matmul, out_dtype=out, invariant=True))
    whole = np.asarray(call(x, w, scales))
    for count in counts:
        for first in {0, max(counts) - count}:
            part = np.asarray(call(x[first : first + count], w, scales))
            np.testing.assert_array_equal(
                part.view(np.uint8), whole[first : first + count].view(np.uint8)
            )


def test_blackwell_schedule_in_interpret_mode():
    x, w, _ = inputs(40, 128, 256, "bf16", BF16)
    plan = Plan(128, 2, blocks=2, portable=True)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        call = functools.partial(blackwell.matmul, out_dtype=jnp.float32, shape=plan)
        got = np.asarray(call(jnp.asarray(x), jnp.asarray(w)))
        assert not interpret_pallas_call.get_races().races_found
    want = x.astype(np.float64) @ np.asarray(w).astype(np.float64).T
    assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want)


def test_three_bf16_terms_are_the_float32_weight():
    w = np.random.default_rng(3).standard_normal((7, 50)).astype(np.float32)
    parts = np.asarray(jax.jit(hopper.terms)(w)).astype(np.float64)
    np.testing.assert_array_equal(parts.sum(0), w.astype(np.float64))


def test_parts_of_k_depend_on_the_weight_alone():
    for n, k, _ in shapes.RELEASED.values():
        parts = hopper.parts_of_k(n, k)
        assert k % (parts * 128) == 0
    assert "rows" not in inspect.signature(hopper.parts_of_k).parameters


@pytest.mark.parametrize("implementation", [i.name for i in row_matmul.IMPLEMENTATIONS])
@pytest.mark.parametrize("function", ["matmul", "matmul_groups", "partial_products"])
def test_scales_of_another_block_are_refused_by_every_implementation(function, implementation):
    """A kernel takes the place of a scale from the weight's shape."""
    lead = (8, 2) if function == "matmul_groups" else (8,)
    dtype = {} if function == "partial_products" else {"out_dtype": jnp.float32}
    x = jax.ShapeDtypeStruct((*lead, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((256, 512), jnp.float8_e4m3fn)
    coarse = jax.ShapeDtypeStruct((2, 4), jnp.float8_e8m0fnu)
    call = functools.partial(getattr(row_matmul, function), implementation=implementation, **dtype)
    with pytest.raises(
        ValueError,
        match=r"expected shape \(8, 16\) for values \(256, 512\), got \(2, 4\)",
    ):
        jax.eval_shape(call, x, w, coarse)


def test_scales_may_be_bytes():
    x, w, scales = inputs(3, 64, 64, "fp8", BF16)
    typed = row_matmul.matmul(
        jnp.asarray(x), jnp.asarray(w), jnp.asarray(scales), out_dtype=jnp.float32
    )
    raw = row_matmul.matmul(
        jnp.asarray(x), jnp.asarray(w), jnp.asarray(scales.view(np.uint8)), out_dtype=jnp.float32
    )
    np.testing.assert_array_equal(np.asarray(typed), np.asarray(raw))
