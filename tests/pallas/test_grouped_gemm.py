"""The grouped expert product: every implementation against float64, at every small case, with fresh
inputs."""

import contextlib
import functools
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import blackwell as blackwell_product
from pallas_kernels import formats, grouped_gemm, registers, target, tiles
from pallas_kernels.cases import tagged
from pallas_kernels.grouped_gemm import blackwell, shapes

SMALL = tagged(shapes.CASES, "test")
NAMES = [i.name for i in grouped_gemm.IMPLEMENTATIONS if not i.misfit(target(), i.name)]


def seeded(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def run(case, args, implementation):
    function = getattr(grouped_gemm, case.function)
    call = functools.partial(function, implementation=implementation, **case.keywords())
    args = jax.tree.map(jnp.asarray, args)
    try:
        return np.asarray(jax.jit(call)(*args))
    except NotImplementedError as why:
        pytest.skip(str(why))


def stored_to_float64(values, scales):
    """Independent of pallas_kernels.formats: numpy and ml_dtypes only."""
    values = np.asarray(values)
    if values.dtype == np.uint8:
        codes = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], -1)
        scale = 2.0 ** (np.asarray(scales).view(np.uint8).astype(np.float64) - 127)
        return formats.E2M1.astype(np.float64)[codes] * np.repeat(scale, 32, -1)
    wide = values.astype(np.float64)
    if scales is None:
        return wide
    scale = 2.0 ** (np.asarray(scales).view(np.uint8).astype(np.float64) - 127)
    return (
        wide * np.repeat(np.repeat(scale, 32, -2), 32, -1)[..., : wide.shape[-2], : wide.shape[-1]]
    )


def quantise_float64(x):
    pad = -x.shape[1] % 32
    groups = np.pad(x.astype(np.float32), ((0, 0), (0, pad))).reshape(len(x), -1, 32)
    amax = np.maximum(np.abs(groups).max(-1), np.float32(1e-4)) * np.float32(1 / 448)
    mantissa, exponent = np.frexp(amax)
    scale = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))[..., None]
    quantised = (groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    return quantised.reshape(len(x), -1)[:, : x.shape[1]]


def float64(case, args):
    x, values, scales, sizes = (args[0], *args[1:4])
    rows = int(sizes.sum())
    expert = np.repeat(np.arange(len(sizes)), sizes)
    wide = np.asarray(x)[:rows].astype(np.float64)
    if case.keywords()["act_quant"]:
        wide = quantise_float64(wide)
    weight = stored_to_float64(values, scales)
    out = np.zeros((len(x), values.shape[-2]))
    for r in range(rows):
        if case.function == "down":
            out[r] = weight[expert[r]] @ wide[r]
            continue
        gate, up = (
            (weight[expert[r], i] @ wide[r]).astype(x.dtype).astype(np.float64) for i in (0, 1)
        )
        gate, up = np.minimum(gate, shapes.LIMIT), np.clip(up, -shapes.LIMIT, shapes.LIMIT)
        out[r] = gate / (1 + np.exp(-gate)) * up * args[4][r]
    return out


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_against_float64(case, implementation):
    args = case.build(seeded(case.name))
    got = run(case, args, implementation)
    want = float64(case, args)
    assert got.dtype == args[0].dtype
    assert np.isfinite(got.astype(np.float32)).all()
    rows = int(args[3].sum())
    assert not got[rows:].astype(np.float32).any(), "rows past the groups must be zero"
    error = np.linalg.norm(got.astype(np.float64) - want)
    assert error <= case.tolerance * np.linalg.norm(want) + 1e-30


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        pytest.param("gate_up", ml_dtypes.bfloat16, id="gate_up-bf16"),
        pytest.param("down", np.float32, id="down-f32"),
        pytest.param("gate_up", np.float32, id="gate_up-f32", marks=pytest.mark.slow),
        pytest.param("down", ml_dtypes.bfloat16, id="down-bf16", marks=pytest.mark.slow),
    ],
)
def test_row_bits_do_not_depend_on_other_rows(function, dtype):
    """Rows taken out, alone, at another place in their tile, or beside other rows: the same
    bits."""
    rng = seeded(function)
    case = shapes.case("x", function, 5, 128, 64, 90, dtype=dtype)
    args = case.build(rng)
    sizes, expert = args[3], np.repeat(np.arange(5), args[3])
    call = jax.jit(
        functools.partial(getattr(grouped_gemm, function), implementation="xla", **case.keywords())
    )
    per_row = (0, 4) if function == "gate_up" else (0,)
    whole = np.asarray(call(*args))
    assert sizes.min() > 0
    for keep in (
        [0],
        [89],
        [3, 40, 41],
        list(range(1, 90)),
        sorted(rng.choice(90, 33, replace=False).tolist()),
    ):
        part = [a[keep] if i in per_row else a for i, a in enumerate(args)]
        part[3] = np.bincount(expert[keep], minlength=5).astype(np.int32)
        np.testing.assert_array_equal(
            np.asarray(call(*part)).view(np.uint8), whole[keep].view(np.uint8)
        )


@pytest.mark.parametrize("implementation", [i.name for i in grouped_gemm.IMPLEMENTATIONS])
@pytest.mark.parametrize(("kind", "scale"), [("fp8", (2, 4)), ("fp4", (256, 4)), ("bf16", (8, 16))])
@pytest.mark.parametrize("function", ["gate_up", "down"])
def test_scales_of_another_shape_are_refused(function, kind, scale, implementation):
    case = shapes.case("x", function, 3, 512, 256, 20, kind)
    x, values, _, *rest = case.abstract()
    wrong = jax.ShapeDtypeStruct((*values.shape[:-2], *scale), jnp.float8_e8m0fnu)
    call = functools.partial(
        getattr(grouped_gemm, function), implementation=implementation, **case.keywords()
    )
    with pytest.raises(ValueError, match=r"scales: .* weights .*, got \(3"):
        jax.eval_shape(call, x, values, wrong, *rest)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_gathered_rows_have_the_bits_of_sorted_ones(kind, implementation):
    rng = seeded(kind)
    case = shapes.case("x", "gate_up", 3, 512, 384, 70, kind, "short", act_quant=True)
    x, *rest = case.build(rng)
    source = rng.integers(0, 70, 70).astype(np.int32)
    x = np.where(np.isnan(x), 1, x)
    gathered = run(case, (x, *rest, source), implementation)
    assert np.linalg.norm(gathered.astype(np.float32)) > 0
    want = run(case, (x[source], *rest), implementation)
    np.testing.assert_array_equal(gathered.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(
    ("kind", "e4m3"), [("fp4", False), ("fp4", True), ("fp8", False), ("bf16", False)]
)
@pytest.mark.parametrize("act_quant", [True, False])
def test_hopper_multiplies_quantised_rows_in_their_order(
    act_quant, kind, e4m3, gathered, monkeypatch
):
    """What reaches the product, rows quantised by a stand-in for the kernel."""
    from pallas_kernels.grouped_gemm import hopper

    def round_trip(x, source=None, *, kind):
        x = formats.round_trip_activations(x if source is None else x[source])
        return registers.order_columns(x, kind).reshape(x.shape)

    def multiply(x, weights, scales, sizes, route, product, *_, ordered):
        found.append(x if ordered else registers.order_columns(x, kind, e4m3=e4m3))
        return jnp.zeros((len(x), product.width), jnp.bfloat16)

    found = []
    monkeypatch.setattr(hopper.quantise, "round_trip", round_trip)
    monkeypatch.setattr(hopper.hopper, "multiply", multiply)
    rng = seeded(kind)
    case = shapes.case("x", "gate_up", 2, 256, 384, 24, kind, act_quant=act_quant)
    args = [None if x is None else jnp.asarray(x) for x in case.build(rng)]
    source = jnp.asarray(rng.integers(0, 24, 17).astype(np.int32)) if gathered else None
    args[4] = args[4] if source is None else args[4][:17]
    hopper.gate_up(*args, source, e4m3=e4m3, **case.keywords())
    want = args[0] if source is None else args[0][source]
    if e4m3:
        want = formats.one_scale_a_row(want)[0]
    elif act_quant:
        want = formats.round_trip_activations(want)
    want = np.asarray(registers.order_columns(want, kind, e4m3=e4m3)).reshape(want.shape)
    (got,) = found
    np.testing.assert_array_equal(np.asarray(got).reshape(want.shape), want)


@pytest.mark.parametrize(("k", "fits"), [(8192, True), (16384, False)])
def test_scales_that_shared_memory_does_not_hold_are_declined(k, fits):
    """Those of two items lie beside the rings: 2 x 256 x K / 32 bytes with few rows."""
    from pallas_kernels.grouped_gemm import hopper

    case = shapes.case("x", "gate_up", 4, k, 256, 24)
    refused = pytest.raises(NotImplementedError, match=f"K = {k} leaves")
    with contextlib.nullcontext() if fits else refused:
        jax.eval_shape(functools.partial(hopper.gate_up, **case.keywords()), *case.abstract())


def test_large_stack_has_the_bits_of_a_small_one(monkeypatch):
    from pallas_kernels.grouped_gemm import xla

    case = shapes.case("x", "gate_up", 4, 128, 64, 30)
    args = case.build(seeded("stack"))
    once = np.asarray(xla.gate_up(*jax.tree.map(jnp.asarray, args), **case.keywords()))
    monkeypatch.setattr(xla, "WHOLE_STACK", 0)
    inside = np.asarray(xla.gate_up(*jax.tree.map(jnp.asarray, args), **case.keywords()))
    np.testing.assert_array_equal(once, inside)


@pytest.mark.parametrize("name", ["gate_up_65536", "down_1024", "gate_up_ep64_fp8"])
def test_released_widths_trace(name):
    case = next(c for c in shapes.CASES if c.name == name)
    args = case.abstract()
    for implementation in ("xla", "reference"):
        call = functools.partial(
            getattr(grouped_gemm, case.function), implementation=implementation, **case.keywords()
        )
        out = jax.eval_shape(call, *args)
        assert out.shape == (args[0].shape[0], args[1].shape[-2])


@pytest.mark.parametrize(
    ("function", "kind"), [("gate_up", "fp4"), ("down", "fp4"), ("gate_up", "bf16")]
)
def test_blackwell_schedule_in_interpret_mode(function, kind):
    """The ring, the ragged store and the SwiGLU of the Blackwell kernel, races watched for."""
    case = shapes.case("x", function, 3, 128, 128, 48, kind, "even")
    x, values, scales, _, *route = case.build(seeded(function + kind))
    x[40:] = np.nan
    args = (x, values, scales, np.array([16, 0, 24], np.int32), *route)
    plan = blackwell_product.Plan(64, 2, blocks=2, portable=True)
    call = functools.partial(getattr(blackwell, function), shape=plan, **case.keywords())
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = np.asarray(call(*jax.tree.map(jnp.asarray, args)))
        assert not interpret_pallas_call.get_races().races_found
    want = float64(case, args)
    assert not got[40:].astype(np.float32).any()
    assert np.linalg.norm(got.astype(np.float64) - want) <= 5e-3 * np.linalg.norm(want)


def test_expected_tiles_match_a_simulation():
    rng = seeded("tiles")
    for mean, rows in ((1.0, 8), (16.0, 24), (40.0, 32), (1024.0, 216)):
        drawn = np.ceil(rng.poisson(mean, 20000) / rows).mean()
        assert abs(tiles.expected_tiles(mean, rows) - drawn) < 0.05


@pytest.mark.parametrize("kind", ["fp4", "fp8", "bf16", "e4m3"])
def test_column_order_is_a_permutation_within_a_step(kind):
    x = jnp.arange(2 * 256).reshape(2, 256).astype(jnp.float32)
    ordered = registers.order_columns(x, "fp4" if kind == "e4m3" else kind, e4m3=kind == "e4m3")
    flat = np.asarray(ordered).reshape(2, 2, 128)
    np.testing.assert_array_equal(np.sort(flat, -1).reshape(2, 256), np.asarray(x))
    if kind == "fp4":  # register i of lane l holds codes 32 l + 8 j + p and + 4, i = 4 j + p
        assert [int(v) for v in flat[0, 0, :8]] == [0, 4, 32, 36, 64, 68, 96, 100]
    if kind == "e4m3":  # register i of lane l holds codes 32 l + 4 i and the next three
        assert [int(v) for v in flat[0, 0, :8]] == [0, 1, 2, 3, 32, 33, 34, 35]


def test_case_names_are_unique_and_counts_positive():
    assert len({c.name for c in shapes.CASES}) == len(shapes.CASES)
    assert all(c.flops > 0 and c.bytes > 0 for c in shapes.CASES)


class TestFormats:
    def test_nibble_order_and_all_sixteen_codes(self):
        packed = jnp.asarray([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], jnp.uint8)
        got = np.asarray(formats.decode_e2m1(packed))[0]
        np.testing.assert_array_equal(got.view(np.uint32), formats.E2M1.view(np.uint32))

    def test_e8m0_is_exact_at_every_byte(self):
        every = np.arange(256, dtype=np.uint8)
        got = np.asarray(jax.jit(formats.decode_e8m0)(every))
        want = np.ldexp(np.float32(1), every[:255].astype(int) - 127)
        np.testing.assert_array_equal(got[:255].view(np.uint32), want.view(np.uint32))
        assert np.isnan(got[255])
        typed = np.asarray(formats.decode_e8m0(jnp.asarray(every.view(ml_dtypes.float8_e8m0fnu))))
        np.testing.assert_array_equal(typed, got)

    def test_smallest_scale_is_not_zero(self):
        got = np.asarray(
            jax.jit(formats.apply_e8m0)(np.array([6.0, -4.0], np.float32), np.zeros(2, np.uint8))
        )
        np.testing.assert_array_equal(got, np.array([6, -4], np.float32) * np.float32(2.0**-127))

    def test_nan_scale_poisons_only_its_group(self):
        scales = np.array([[127, 255]], np.uint8)
        got = np.asarray(
            formats.dequantise_rows(jnp.full((1, 32), 0x22, jnp.uint8), jnp.asarray(scales))
        )
        assert (got[0, :32] == 1).all() and np.isnan(got[0, 32:]).all()

    @pytest.mark.parametrize("shape", [(32, 32), (40, 32), (33, 70), (1, 5)])
    def test_blocks_with_partial_edges(self, shape):
        rng = seeded(str(shape))
        values, scales = shapes.weight(rng, shape, "fp8")
        got = np.asarray(formats.dequantise_blocks(jnp.asarray(values), jnp.asarray(scales)))
        np.testing.assert_array_equal(got, stored_to_float64(values, scales).astype(np.float32))

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "f32"])
    def test_activations_are_rounded_as_the_reference_does(self, dtype):
        rng = seeded("act")
        x = rng.standard_normal((64, 96)) * np.exp2(rng.integers(-20, 12, (64, 1)))
        x[0] = 0
        x[1, 0], x[2, :32] = 448, 1e-6
        x[3, :32] = np.exp2(np.arange(-16, 16))
        x = x.astype(dtype)
        got = np.asarray(jax.jit(formats.round_trip_activations)(x))
        np.testing.assert_array_equal(
            got.astype(np.float64), quantise_float64(x).astype(dtype).astype(np.float64)
        )

    def test_power_of_two_stays(self):
        exact = np.exp2(np.arange(-30, 30)).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(formats.pow2ceil(jnp.asarray(exact))), exact)
        above = np.nextafter(exact, np.float32(np.inf))
        np.testing.assert_array_equal(np.asarray(formats.pow2ceil(jnp.asarray(above))), exact * 2)
        _, scale = formats.quantise_activations(jnp.full((1, 32), 448.0))
        assert float(scale[0, 0]) == 1.0

    def test_one_scale_a_row_changes_only_what_is_far_below_it(self):
        x = seeded("row scale").standard_normal((8, 128)).astype(np.float32)
        x[:, 32:64] *= 2.0**-12
        values, scale = formats.one_scale_a_row(jnp.asarray(x))
        got = np.asarray(values).astype(np.float64) * np.asarray(scale)[:, None]
        want = quantise_float64(x)
        np.testing.assert_array_equal(got[:, :32], want[:, :32])
        np.testing.assert_array_equal(got[:, 64:], want[:, 64:])
        assert np.abs(got - want).max() <= np.asarray(scale).max() * 2.0**-10

    def test_e4m3_rounding_is_that_of_the_type(self):
        every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        every = np.unique(every[np.isfinite(every)])
        middle = (every[1:] + every[:-1]) / 2
        x = np.concatenate([every, middle, np.nextafter(middle, np.float32(np.inf))])
        got = np.asarray(jax.jit(formats.round_e4m3)(x))
        want = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize(
        ("values", "scales", "message"),
        [
            (np.zeros((4, 16), np.uint8), None, "MXFP4 weights need"),
            (np.zeros((4, 32), ml_dtypes.float8_e4m3fn), None, "e4m3 weights need"),
            (np.zeros((4, 32), np.float32), np.zeros((1, 1), np.uint8), "carry none"),
            (np.zeros((64, 32), ml_dtypes.float8_e4m3fn), np.zeros((1, 1), np.uint8), "expected"),
            (np.zeros((4, 64), np.uint8), np.zeros((4, 1), np.uint8), r"expected shape \(4, 4\)"),
        ],
    )
    def test_wrong_scales_are_named(self, values, scales, message):
        with pytest.raises(ValueError, match=message):
            formats.dequantise(jnp.asarray(values), None if scales is None else jnp.asarray(scales))


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("implementation", [i.name for i in grouped_gemm.IMPLEMENTATIONS])
def test_no_rows_give_an_empty_result(implementation, indexed):
    options = dict(act_quant=True, implementation=implementation)
    sizes, weights = jnp.zeros(3, jnp.int32), jnp.zeros((3, 2, 8, 64), jnp.bfloat16)
    x = jnp.zeros((4 if indexed else 0, 64), jnp.bfloat16)
    source = jnp.zeros(0, jnp.int32) if indexed else None
    hidden = grouped_gemm.gate_up(
        x, weights, None, sizes, jnp.zeros(0), source, limit=10.0, **options
    )
    assert (hidden.shape, hidden.dtype) == ((0, 8), jnp.bfloat16)
    out = grouped_gemm.down(hidden, jnp.zeros((3, 16, 8), jnp.bfloat16), None, sizes, **options)
    assert (out.shape, out.dtype) == ((0, 16), jnp.bfloat16)
