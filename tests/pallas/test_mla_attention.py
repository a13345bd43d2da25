"""mla_attention: the reference against float64, the kernels against the reference."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import target
from pallas_kernels.cases import tagged
from pallas_kernels.formats import E2M1
from pallas_kernels.mla_attention import IMPLEMENTATIONS, attend, xla
from pallas_kernels.mla_attention.reference import BLOCK, ROW_TILE, unpack
from pallas_kernels.mla_attention.shapes import CASES
from pallas_kernels.mla_attention.shapes import SCALE as SCALES
from pallas_kernels.mla_attention.shapes import stored as stored_rows
from tests.pallas import emulate

SCALE = 0.125


def oracle(q, window, window_index, selected, selected_index, sink, scale=SCALE):
    """Plain softmax in float64, row by row."""
    q, sink = np.asarray(q, np.float64), np.asarray(sink, np.float64)
    out = np.zeros(q.shape)
    for r in range(q.shape[0]):
        keys = [np.asarray(window, np.float64)[i] for i in np.asarray(window_index)[r] if i >= 0]
        if selected_index is not None:
            table = np.asarray(selected, np.float64)
            keys += [table[i] for i in np.asarray(selected_index)[r] if i >= 0]
        if keys:
            key = np.stack(keys)
            score = scale * q[r] @ key.T
            peak = score.max(-1, keepdims=True)
            prob = np.exp(score - peak)
            total = prob.sum(-1, keepdims=True) + np.exp(sink[:, None] - peak)
            out[r] = prob @ key / total
    return out


def draw(seed, r=5, h=4, d=32, n=40, m=90, w=8, k=24, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(r, h, d)), dtype)
    window = jnp.asarray(rng.normal(size=(n, d)), dtype)
    selected = jnp.asarray(rng.normal(size=(m, d)), dtype)
    window_index = rng.integers(-1, n, (r, w)).astype(np.int32)
    selected_index = np.sort(rng.integers(-1, m, (r, k)), -1).astype(np.int32)
    sink = jnp.asarray(rng.normal(size=h), jnp.float32)
    return q, window, jnp.asarray(window_index), selected, jnp.asarray(selected_index), sink


def stored(seed, n, d, kind):
    """Random stored rows and the same rows dequantised in float32."""
    rng = np.random.default_rng(seed)
    if kind == "window":
        values = rng.normal(size=(n, d)).astype(ml_dtypes.float8_e4m3fn)
        scales = np.exp2(rng.integers(-4, 3, (n, d // 32))).astype(ml_dtypes.float8_e8m0fnu)
        plain = values.astype(np.float32) * np.repeat(scales.astype(np.float32), 32, -1)
    else:
        values = rng.integers(0, 256, (n, d // 2)).astype(np.uint8)
        scales = rng.uniform(0.01, 2, (n, d // 16)).astype(ml_dtypes.float8_e4m3fn)
        code = np.stack([values % 16, values // 16], -1).reshape(n, d)
        plain = np.asarray(E2M1, np.float32)[code]
        plain = plain * np.repeat(scales.astype(np.float32), 16, -1)
    return (jnp.asarray(values), jnp.asarray(scales)), plain


@pytest.mark.parametrize(
    "shape",
    [
        {},
        dict(r=1, h=1, d=32, w=1, k=1),
        dict(r=3, h=3, d=96, w=63, k=2),
        dict(r=2, h=5, d=64, w=128, k=100),
        dict(r=5 * ROW_TILE + 3, h=2, d=32),
    ],
)
def test_reference_equals_float64(shape):
    args = draw(0, **shape)
    out = attend(*args, scale=SCALE)
    np.testing.assert_allclose(out, oracle(*args), atol=2e-5)


def test_bfloat16_is_close_to_float64():
    args = draw(1, w=128, k=200, n=300, m=400, d=64, dtype=jnp.bfloat16)
    out = attend(*args, scale=SCALE)
    assert out.dtype == jnp.bfloat16
    ref = oracle(*args)
    assert np.linalg.norm(np.asarray(out, np.float64) - ref) < 1e-2 * np.linalg.norm(ref)


def test_blocks_of_64_round_p_against_the_running_maximum():
    """The bfloat16 of P is taken relative to the maximum of the blocks read so far."""
    q, window, index, selected, chosen, sink = draw(2, r=2, w=70, k=130, n=90, dtype=jnp.bfloat16)
    run = jax.jit(lambda *a: attend(*a, scale=SCALE))
    out = run(q, window, index, selected, chosen, sink)
    q32, sink = np.asarray(q, np.float32), np.asarray(sink)
    want = np.zeros(q.shape, np.float32)
    for r in range(2):
        keys = [np.asarray(window, np.float32)[i] if i >= 0 else None for i in np.asarray(index)[r]]
        table = np.asarray(selected, np.float32)
        keys += [table[i] if i >= 0 else None for i in np.asarray(chosen)[r]]
        for h in range(q.shape[1]):
            peak, total, acc = np.float32(-1e30), np.float32(0), np.zeros(q.shape[2], np.float32)
            for b in range(0, len(keys), BLOCK):
                real = [key for key in keys[b : b + BLOCK] if key is not None]
                score = np.asarray([SCALE * (q32[r, h] @ key) for key in real], np.float32)
                new = max(peak, score.max())
                prob, decay = np.exp(score - new), np.exp(peak - new)
                total = total * decay + prob.sum()
                acc = acc * decay + prob.astype(ml_dtypes.bfloat16).astype(np.float32) @ real
                peak = new
            want[r, h] = acc / (total + np.exp(sink[h] - peak))
    got = np.asarray(out, np.float32)
    assert (np.abs(got - want) <= np.abs(want) * 2.0**-8 + 1e-6).all()
    assert (got == want.astype(ml_dtypes.bfloat16).astype(np.float32)).mean() > 0.98


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_rows_equal_dequantised_rows_bit_for_bit(dtype):
    q, _, index, _, chosen, sink = draw(3, d=64, dtype=dtype)
    window, plain_window = stored(4, 40, 64, "window")
    selected, plain_selected = stored(5, 90, 64, "selected")
    for packed, plain in ((window, plain_window), (selected, plain_selected)):
        np.testing.assert_array_equal(unpack(packed, jnp.bfloat16), plain.astype(jnp.bfloat16))
        np.testing.assert_array_equal(plain.astype(jnp.bfloat16).astype(np.float32), plain)
    one = attend(q, window, index, selected, chosen, sink, scale=SCALE)
    rows = jnp.asarray(plain_window, dtype), jnp.asarray(plain_selected, dtype)
    two = attend(q, rows[0], index, rows[1], chosen, sink, scale=SCALE)
    np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


@pytest.mark.parametrize("sink", [0.0, -np.inf, 80.0])
def test_fully_masked_rows_are_zero(sink):
    q, window, index, selected, chosen, _ = draw(6)
    index, chosen = index.at[1].set(-1), chosen.at[1].set(-1)
    out = attend(q, window, index, selected, chosen, jnp.full(4, sink), scale=SCALE)
    assert np.isfinite(np.asarray(out)).all()
    assert not np.asarray(out)[1].any()


def test_empty_slots_never_read_and_unused_rows_may_be_poison():
    q, window, index, selected, chosen, sink = draw(7)
    clean = attend(q, window, index, selected, chosen, sink, scale=SCALE)
    bad_window, bad_selected = np.array(window), np.array(selected)
    bad_window[np.setdiff1d(np.arange(40), np.asarray(index))] = np.nan
    bad_selected[np.setdiff1d(np.arange(90), np.asarray(chosen))] = np.nan
    assert (np.asarray(index) == -1).any() and (np.asarray(chosen) == -1).any()
    args = jnp.asarray(bad_window), index, jnp.asarray(bad_selected), chosen, sink
    np.testing.assert_array_equal(attend(q, *args, scale=SCALE), clean)
    none = jnp.full_like(index, -1)
    poison = jnp.full_like(window, jnp.nan)
    out = attend(q, poison, none, poison, none, sink, scale=SCALE)
    assert not np.asarray(out).any()


def test_without_selected_rows():
    q, window, index, _, _, sink = draw(8)
    ref = oracle(q, window, index, None, None, sink)
    nothing = jnp.zeros((5, 0), jnp.int32)
    for selected, chosen in ((None, None), (None, nothing), (window, nothing), (window[:0], None)):
        out = attend(q, window, index, selected, chosen, sink, scale=SCALE)
        np.testing.assert_allclose(out, ref, atol=2e-5)
    masked = jnp.full((5, 3), -1, jnp.int32)
    out = attend(q, window, index, window[:0], masked, sink, scale=SCALE)
    np.testing.assert_allclose(out, ref, atol=2e-5)


def test_repeated_entries_count_twice():
    q, window, index, _, _, sink = draw(9)
    out = attend(q, window, index, window, index, sink, scale=SCALE)
    np.testing.assert_allclose(out, oracle(q, window, index, window, index, sink), atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_the_other_rows(dtype):
    args = draw(10, r=40, h=4, d=64, w=16, k=80, dtype=dtype)
    q, window, index, selected, chosen, sink = args
    run = jax.jit(lambda q, i, c: attend(q, window, i, selected, c, sink, scale=SCALE))
    whole = np.asarray(run(q, index, chosen))
    for first, count in ((0, 1), (3, 2), (7, 6), (3, ROW_TILE), (0, 33)):
        part = slice(first, first + count)
        np.testing.assert_array_equal(run(q[part], index[part], chosen[part]), whole[part])


def test_unknown_implementation():
    with pytest.raises(ValueError, match="no implementation 'fast'; expected auto"):
        attend(*draw(11), scale=SCALE, implementation="fast")


def built(case):
    """Fresh arguments of a case and the same with every stored row dequantised."""
    args = case.build(np.random.default_rng())
    q, window, index, selected, chosen, sink = args

    def plain(rows):
        if isinstance(rows, tuple):
            rows = unpack(tuple(jnp.asarray(x) for x in rows), jnp.float32)
        return None if rows is None else np.asarray(rows, np.float64)

    return jax.tree.map(jnp.asarray, args), (q, plain(window), index, plain(selected), chosen, sink)


@pytest.mark.parametrize("case", tagged(CASES, "test"), ids=lambda case: case.name)
def test_reference_on_every_small_shape(case):
    args, plain = built(case)
    want = oracle(*plain, scale=SCALES)
    run = jax.jit(lambda *a: attend(*a, implementation="reference", **case.keywords()))
    got = np.asarray(run(*args), np.float64)
    assert np.linalg.norm(got - want) <= case.tolerance * np.linalg.norm(want)


@pytest.mark.parametrize("case", tagged(CASES, "test"), ids=lambda case: case.name)
@pytest.mark.parametrize("turns", [False, True])
def test_without_loops_on_every_small_shape(case, turns, monkeypatch):
    """The form for GPUs without a kernel, run here; turns: a tile has room for 3 to 6 rows."""
    args, plain = built(case)
    if turns:
        slots = BLOCK + sum(x.shape[1] for x in (args[2], args[4]) if x is not None)
        monkeypatch.setattr(xla, "GATHERED", 3 * slots * args[0].shape[2] * 8)
    run = jax.jit(lambda *a: xla.attend(*a, **case.keywords()))
    got = np.asarray(run(*args), np.float64)
    want = oracle(*plain, scale=SCALES)
    assert np.linalg.norm(got - want) <= case.tolerance * np.linalg.norm(want)


def test_without_loops_takes_no_rows():
    q, window, window_index, selected, selected_index, sink = draw(12)
    args = (q[:0], window, window_index[:0], selected, selected_index[:0], sink)
    assert xla.attend(*args, scale=SCALE).shape == (0, 4, 32)


def test_without_loops_declines_what_it_cannot_promise(monkeypatch):
    args = draw(12)
    with pytest.raises(NotImplementedError, match="how many rows"):
        xla.attend(*args, scale=SCALE, invariant=True)
    monkeypatch.setattr(xla, "GATHERED", 1000)
    with pytest.raises(NotImplementedError, match="a tile 1000"):
        xla.attend(*args, scale=SCALE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", tagged(CASES, "test"), ids=lambda case: case.name)
@pytest.mark.parametrize("kind", [i for i in IMPLEMENTATIONS if i.name != "reference"], ids=str)
def test_kernels_on_every_small_shape(case, kind):
    if kind.misfit(target()):
        pytest.skip(kind.misfit(target()))
    args, plain = built(case)
    run = jax.jit(lambda *a: attend(*a, implementation=kind.name, **case.keywords()))
    if kind.name in dict(case.declines):
        with pytest.raises(NotImplementedError):
            run(*args)
        return
    out = run(*args)
    want, got = oracle(*plain, scale=SCALES), np.asarray(out, np.float64)
    assert np.linalg.norm(got - want) <= case.tolerance * np.linalg.norm(want)
    np.testing.assert_array_equal(out, run(*args))
    if kind.name == "xla":
        return
    q, window, index, selected, chosen, sink = args
    some = None if chosen is None else chosen[1:]
    np.testing.assert_array_equal(run(q[1:], window, index[1:], selected, some, sink), out[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "window", "chosen"), [(1, 1, 0), (3, 1, 2)])
def test_blackwell_kernel_in_interpret_mode(rows, window, chosen):
    """Products, running maximum and every barrier; rows are copied one by one, not gathered."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    from pallas_kernels.mla_attention import blackwell

    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(rows, 64, 512)), jnp.bfloat16)
    table = jnp.asarray(rng.normal(size=(100, 512)), jnp.bfloat16)
    sink = jnp.asarray(rng.normal(size=64), jnp.float32)
    index, far = (
        jnp.asarray(rng.integers(-1, 100, (rows, 64 * blocks)), jnp.int32)
        for blocks in (window, chosen)
    )
    index, far = index.at[0, :63].set(-1), far.at[0].set(-1)
    kinds, blocks = ("bfloat16",) * 2, (window, chosen)
    sources = (table, index, table, far)
    if not chosen:
        kinds, blocks, sources = kinds[:1], blocks[:1], sources[:2]
    run = blackwell.program(rows, kinds, blocks, SCALES, processors=1, by_row=True)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = jax.block_until_ready(jax.jit(run)(q, sink, *sources))
        assert not interpret_pallas_call.get_races().races_found
    want = attend(q, table, index, table, far, sink, scale=SCALES)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want, np.float32), atol=1e-2)


def from_tiles(raw):
    """A block [64, 512] out of the swizzled tiles that gather.py describes."""
    row, chunk = np.meshgrid(np.arange(64), np.arange(64), indexing="ij")
    start = 8192 * (row // 8) + 1024 * (chunk // 8) + 128 * (row % 8)
    start = start + 16 * ((chunk % 8) ^ (row % 8))
    pieces = raw.reshape(-1).view(np.uint8)[start[..., None] + np.arange(16)]
    return pieces.reshape(64, 1024).view(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("kind", ["bfloat16", "e4m3", "e2m1"])
def test_gathered_block_equals_dequantised_rows(kind, monkeypatch):
    """The code of every thread, emulated: rows, formats, tiles, empty slots and the mask."""
    from pallas_kernels import ptx
    from pallas_kernels.mla_attention import gather

    rng = np.random.default_rng(0)
    rows = stored_rows(rng, 50, 512, kind)
    parts = rows if isinstance(rows, tuple) else (rows,)
    index = rng.integers(-1, 50, 64).astype(np.int32)
    memory = emulate.Memory()
    refs = [memory.place(x) for x in parts]
    slots, mask = memory.place(index), memory.place(np.zeros(64, np.float32))
    tile = memory.place(np.zeros((64, 512), ml_dtypes.bfloat16))
    with emulate.emulated(monkeypatch, memory, ptx, gather):
        found = gather.load_index(slots)
        gather.write_mask(found, mask)
        for quarter in range(4 if kind == "bfloat16" else 0):
            gather.copy_bfloat16(found, *refs, tile, quarter)
        for unit in range(gather.UNITS[kind]):
            load, store = getattr(gather, f"load_{kind}"), getattr(gather, f"store_{kind}")
            store(load(found, *refs, unit=unit), tile, unit)
    plain = rows.astype(np.float32) if len(parts) == 1 else None
    if plain is None:
        plain = np.asarray(unpack(tuple(jnp.asarray(x) for x in parts), jnp.float32))
    want = np.where(index[:, None] >= 0, plain[np.maximum(index, 0)], 0)
    np.testing.assert_array_equal(from_tiles(memory.read(tile)), want)
    np.testing.assert_array_equal(memory.read(mask), np.where(index < 0, -np.inf, 0))
