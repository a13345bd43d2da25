"""The dense row product: float64 error, and with invariant=True the same bits for every number of
rows."""

import functools
import inspect
import math
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import row_matmul, target, tiles
from pallas_kernels.blackwell import Plan
from pallas_kernels.grouped_gemm.shapes import weight
from pallas_kernels.row_matmul import blackwell, hopper, plans, shapes
from pallas_kernels.several import Several
from pallas_kernels.tiles import Plan as Tile
from pallas_kernels.tiles import Product, fit

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


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("invariant", [False, True])
def test_several_weights_give_the_bits_of_each(implementation, invariant):
    x, *first = map(jnp.asarray, inputs(70, 64, 128, "fp8", BF16))
    weights = tuple(first), tuple(map(jnp.asarray, inputs(1, 96, 128, "fp8", BF16)[1:]))
    options = dict(out_dtype=BF16, invariant=invariant, implementation=implementation)
    try:
        found = row_matmul.partial_products_of(x, weights, **options)
    except NotImplementedError as why:
        pytest.skip(str(why))
    assert [parts.shape[2] for parts in found] == [64, 96]
    for parts, each in zip(found, weights, strict=True):
        want = row_matmul.partial_products(x, *each, **options)
        np.testing.assert_array_equal(np.asarray(parts), np.asarray(want))


def test_scales_of_every_one_of_several_weights_are_checked():
    x, w, scales = map(jnp.asarray, inputs(2, 64, 128, "fp8", BF16))
    with pytest.raises(ValueError, match=r"expected shape \(2, 4\) for values \(64, 128\)"):
        row_matmul.partial_products_of(x, ((w, scales), (w, scales[:1])), out_dtype=BF16)


@pytest.mark.parametrize(
    ("kinds", "widths", "invariant", "launches", "parts"),
    [
        (("fp8", "fp8"), (1280, 512), False, 1, [10, 10]),
        (("fp8", "fp8"), (1280, 512), True, 2, [2, 4]),
        (("fp8", "fp8"), (2304, 2304), True, 1, [1, 1]),
        (("fp8", "bf16"), (2304, 2304), True, 2, [1, 1]),
        (("bf16", "bf16"), (64, 36), True, 2, [8, 8]),
    ],
)
def test_launches_of_several_weights(kinds, widths, invariant, launches, parts):
    """One for weights of one kind and as many parts of K."""
    weights = []
    for kind, n in zip(kinds, widths, strict=True):
        stored = jnp.float8_e4m3fn if kind == "fp8" else jnp.bfloat16
        blocks = jax.ShapeDtypeStruct((-(-n // 32), 160), jnp.uint8) if kind == "fp8" else None
        weights.append((jax.ShapeDtypeStruct((n, 5120), stored), blocks))
    options = dict(out_dtype=BF16, invariant=invariant)
    traced = jax.make_jaxpr(functools.partial(hopper.partial_products_of, **options))(
        jax.ShapeDtypeStruct((16, 5120), jnp.bfloat16), tuple(weights)
    )
    assert [out.shape for out in traced.out_avals] == [
        (part, 16, n) for part, n in zip(parts, widths, strict=True)
    ]
    assert str(traced).count("name=product_") == launches


def test_tiles_of_several_weights_follow_each_other():
    several = Several((200, 64, 128), 64)
    found = [tuple(map(int, several.place(jnp.int32(m)))) for m in range(several.tiles)]
    assert found == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (2, 1)]
    assert [int(several.value(which, (7, 8, 9))) for which, _ in found] == [7] * 4 + [8, 9, 9]


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
    parts = np.asarray(jax.jit(blackwell.terms)(w)).astype(np.float64)
    np.testing.assert_array_equal(parts.sum(0), w.astype(np.float64))


PRODUCTS = [(*value, 1) for value in shapes.RELEASED.values()]
PRODUCTS.append((*shapes.WO_A[1:], shapes.WO_A[0]))
ROWS = (1, 16, 64, 256, 384, 1024, 1536, 4096, 16384, 65536)


def items(rows, channels, parts, plan, matrices):
    tiles = math.ceil(channels / plan.height) * math.ceil(rows / plan.rows)
    return matrices * parts * tiles


@pytest.mark.parametrize(("n", "k", "kind", "matrices"), PRODUCTS)
def test_every_cut_can_run(n, k, kind, matrices):
    for rows in ROWS:
        parts, plan = plans.best(kind, rows, n, k, None, matrices)
        steps = k // 128
        assert steps % parts == 0 and (parts == 1 or steps // parts >= plans.LEAST)
        assert plan.rows % 8 == 0 and plan.rows <= plans.most_rows(kind, plan.groups)
        for out in (jnp.bfloat16, jnp.float32):
            product = Product(kind, rows, k, n, splits=parts, out_dtype=out)
            ring = fit(plan, product)
            # A slot of a ring is freed in the step after its own.
            assert ring.weight_stages >= 2 and ring.row_stages >= 2 * tiles.parts(plan, product)
        assert matrices == 1 or n % plan.height == 0
        fixed, other = plans.best(kind, rows, n, k, 2, matrices)
        assert fixed == 2
        least = plans.microseconds(kind, rows, n, k, parts, plan, matrices)
        assert least <= plans.microseconds(kind, rows, n, k, fixed, other, matrices)


def test_a_single_group_may_end_within_a_tile():
    """As a plain product may: its best cut is then taken, not declined."""
    _, plan = plans.best("fp8", 64, 1280, 4096)
    assert 1280 % plan.height
    x = jax.ShapeDtypeStruct((64, 1, 4096), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1280, 4096), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((40, 128), jnp.uint8)
    call = functools.partial(hopper.matmul_groups, out_dtype=jnp.bfloat16)
    assert jax.eval_shape(call, x, w, scales).shape == (64, 1, 1280)


@pytest.mark.parametrize(("n", "k", "kind", "matrices"), PRODUCTS)
def test_few_rows_reach_most_multiprocessors(n, k, kind, matrices):
    for rows in (1, 16):
        cut = plans.best(kind, rows, n, k, None, matrices)
        assert 40 <= items(rows, n, *cut, matrices) <= 132


def test_parts_for_every_number_of_rows_are_a_function_of_the_weight():
    found = [plans.parts_of_k(kind, n, k) for n, k, kind in shapes.RELEASED.values()]
    assert found == [2, 1, 4, 1, 1, 4, 4, 40]
    assert plans.parts_of_k("f32", 384, 5120) == 2
    assert "rows" not in inspect.signature(plans.parts_of_k).parameters


MEASURED = [
    ("wq_a", 16, 2, 8, 16.8),
    ("wq_a", 4096, 2, 128, 117.9),
    ("wq_b", 256, 1, 256, 35.4),
    ("wq_b", 4096, 1, 256, 518.2),
    ("wkv", 16, 4, 8, 11.2),
    ("wkv", 4096, 4, 128, 58.0),
    ("wo_b", 16, 1, 8, 42.4),
    ("wo_b", 256, 1, 88, 56.8),
    ("wo_b", 1024, 1, 176, 139.2),
    ("shared_up", 16, 1, 8, 26.8),
    ("shared_up", 1024, 1, 152, 43.4),
    ("router", 16, 4, 8, 8.1),
    ("router", 4096, 4, 128, 50.0),
]
"""(weight, rows, parts, rows of a tile of two warpgroups, microseconds on an H200)."""


@pytest.mark.parametrize(("name", "rows", "parts", "tile", "measured"), MEASURED)
def test_estimates_are_near_what_was_measured(name, rows, parts, tile, measured):
    n, k, kind = shapes.RELEASED[name]
    estimate = plans.microseconds(kind, rows, n, k, parts, Tile(tile))
    assert estimate == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("function", "kind", "parts"),
    [("matmul", "f32", 1), ("partial_products", "f32", 40), ("partial_products", "bf16", 10)],
)
def test_the_kernel_takes_the_weight_as_stored(function, kind, parts):
    """Nothing as large is computed from the weight first, and there is a result for each part."""
    n, k = (24, 20480) if kind == "f32" else (384, 5120)
    x = jax.ShapeDtypeStruct((16, k), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((n, k), jnp.float32 if kind == "f32" else jnp.bfloat16)
    named = {"out_dtype": jnp.float32} if function == "matmul" else {}
    traced = jax.make_jaxpr(functools.partial(getattr(hopper, function), **named))(x, w)
    (out,) = traced.out_avals
    assert out.shape == ((16, n) if function == "matmul" else (parts, 16, n))
    made = [v.aval.shape for e in traced.jaxpr.eqns for v in e.outvars]
    assert not [shape for shape in made if math.prod(shape) >= n * k]


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
