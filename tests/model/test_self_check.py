"""Values that need no checkpoint: constants of the release and the number formats, computed by hand
or by independent code (V4.1 report; inference/model.py, engram.py, kernel.py).

The released census is in converters/test_names.py, the token map in converters/test_token_map.py.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax import shipped
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.model import cache, engram_hash, hyper, quant, rope
from deepinfer_jax.model.setup import Setup
from pallas_kernels import formats, hyper_connections
from tests.golden import values
from tests.oracle import engram as plain_engram
from tests.oracle import formats as plain_formats

DEAD = engram_hash.DEAD


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return ModelConfig.from_json(shipped.find("models", "v41-flash"))


@pytest.fixture(scope="module")
def engram_data() -> dict:
    return values.release_engram()


def hashed(cfg: ModelConfig, classes: list[int], layer: int) -> np.ndarray:
    """Table rows of a sequence of classes by the model's own arithmetic."""
    deep = cfg.engram_max_ngram_size
    history = np.full((len(classes), deep), DEAD, np.int32)
    for back in range(deep):
        history[back:, back] = classes[: len(classes) - back]
    constants = engram_hash.hash_constants(cfg)[layer]
    return np.asarray(
        engram_hash.hash_rows(jnp.asarray(history), jnp.int32(cfg.engram_pad_token_id), constants)
    )


def test_engram_constants(released, engram_data):
    found = engram_hash.hash_constants(released)
    for number, layer in enumerate(released.engram_layer_ids):
        constants = found[layer]
        flat = np.ravel(engram_data["primes"][number]).tolist()
        assert list(constants.primes) == flat and sum(flat) == (384006168, 384016682)[number]
        assert list(constants.multipliers) == [int(m) for m in engram_data["multipliers"][number]]
        assert list(constants.offsets) == np.ravel(engram_data["offsets"][number]).tolist()
    assert found[1].primes[:3] == (16000057, 16000079, 16000081)
    assert found[14].primes[-1] == 16000889
    assert found[1].multipliers == (
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    )
    assert found[14].multipliers == (
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    )


CHAT = [0, 98615, 15844, 1751, 98616]  # classes of: begin, User, "Hello", " world", Assistant
CHAT_ROWS = {
    (1, 0): "5702652 24393184 39183301 61503783 78984481 90144770 103724983 121476532 131476717 "
    "152385926 164143652 191599181 198145581 217419202 238329687 247482304 257520185 283540304 "
    "288689443 315264704 322314652 348890037 367865216 380066193",
    (1, 4): "12178968 23476386 41922047 53997854 76482179 91542482 108491234 112140390 139250881 "
    "146865707 163754040 185487372 194861663 221056411 229231954 244264946 270976369 276869621 "
    "298726041 309968669 328247139 339839119 359454398 373597274",
    (14, 4): "7775989 24804805 42618124 58723382 68044923 88695527 104656944 114331865 143376941 "
    "147054202 175183964 188078330 207670345 208774025 236878289 240504478 265084840 280125752 "
    "293588688 307641057 334480014 343554493 367184595 374753992",
}


def test_engram_rows(released):
    for (layer, position), rows in CHAT_ROWS.items():
        want = [int(row) for row in rows.split()]
        assert hashed(released, CHAT, layer)[position].tolist() == want


def test_engram_rows_around_an_image_token(released):
    ids = [0, 5, 7, 9, 11]
    columns = [0, 1, 2, 8, 9, 16, 17]
    rows = hashed(released, ids, 1)[4, columns].tolist()
    assert rows == [13176822, 30752650, 42532473, 138863141, 149049926, 270881916, 281803173]
    rows = hashed(released, ids, 14)[4, columns].tolist()
    assert rows == [12296247, 27973265, 33986173, 134824779, 146341074, 267438965, 275926991]
    dead = hashed(released, [0, 5, DEAD, 9, 11], 1)[4, columns].tolist()
    assert dead == [13176822, 30752650, 42532473, 139153079, 149386047, 259164394, 276643651]


def test_engram_rows_of_texts(released, engram_data):
    """Texts through the released tokenizer, and one with a masked span, from independent code."""
    for case in engram_data["cases"]:
        for layer in (1, 14):
            want = case[f"hash_rows_layer{layer}"]
            np.testing.assert_array_equal(hashed(released, case["compressed"], layer), want)
    masked = engram_data["masked_case"]
    classes = np.array(masked["compressed"])
    classes[masked["dead_positions"]] = DEAD
    for layer in (1, 14):
        want = masked[f"hash_rows_layer{layer}"]
        np.testing.assert_array_equal(hashed(released, classes.tolist(), layer), want)


def test_hashing_is_exact_at_the_largest_values(released):
    """The widest classes and multipliers against python integers."""
    classes = [99091, 99091, 99090, 99091, 1, 0, 99091]
    for layer, constants in engram_hash.hash_constants(released).items():
        assert max(constants.multipliers) * 99091 < 2**63
        primes = np.reshape(constants.primes, (3, 8)).tolist()
        want = plain_engram.table_rows(classes, 2, primes, list(constants.multipliers))
        np.testing.assert_array_equal(hashed(released, classes, layer), want)


def test_yarn(released):
    got = rope.inverse_frequencies(released, compressed=True)
    want = {
        0: 1.0,
        1: 0.687656022,
        15: 0.00363553858,
        16: 0.002265625,
        20: 2.96977778e-4,
        24: 1.953125e-5,
        25: 5.37231267e-6,
        31: 5.68052904e-7,
    }
    for index, value in want.items():
        assert got[index] == pytest.approx(value, rel=2e-6), index
    plain = rope.inverse_frequencies(released, compressed=False)
    np.testing.assert_allclose(plain, 10000.0 ** (-np.arange(32) / 32), rtol=1e-6)


def test_rotation_is_interleaved_trailing_and_undone():
    frequencies = np.float32([0.5, 0.25])
    x = np.float32([[9, 8, 7, 6, 1, 0, 0, 2]])
    got = rope.rotate(jnp.asarray(x), jnp.int32([3]), frequencies)
    c, s = np.cos([1.5, 0.75]), np.sin([1.5, 0.75])
    want = [9, 8, 7, 6, c[0], s[0], -2 * s[1], 2 * c[1]]
    np.testing.assert_allclose(got[0], want, atol=1e-6)
    back = rope.rotate(got, jnp.int32([3]), frequencies, inverse=True)
    np.testing.assert_allclose(back, x, atol=1e-6)


def mixes_of(released):
    k = np.arange(24)
    m, base = (k - 11.5) / 7, ((7 * k % 24) - 12) / 10
    return m, np.array([0.5, 0.7, 0.9]), base


def test_sinkhorn(released):
    """An asymmetric matrix: transposing comb, or ending on rows, is seen."""
    m, scale, base = mixes_of(released)
    mix = hyper.Mixes(
        *hyper_connections.mixes(
            jnp.asarray(m, jnp.float32)[None, None],
            jnp.ones((1,), jnp.float32),
            jnp.asarray(scale, jnp.float32),
            jnp.asarray(base, jnp.float32),
            n=released.hc_mult,
            eps=released.rms_norm_eps,
            hc_eps=released.hc_eps,
            iterations=released.hc_sinkhorn_iters,
        )
    )
    want = (
        [0.1169724, 0.2227011, 0.3825905, 0.5726965],
        [0.3501725, 0.6416426, 1.0249948, 0.3501725],
        [
            [0.1157381, 0.1778946, 0.5906283, 0.1157381],
            [0.2499997, 0.3842616, 0.1157381, 0.2499997],
            [0.2499997, 0.3842616, 0.1157381, 0.2499997],
            [0.3842615, 0.0535813, 0.1778946, 0.3842616],
        ],
    )
    for got, expected in zip((mix.pre, mix.post, mix.comb), want, strict=True):
        np.testing.assert_allclose(got[0], expected, atol=2e-7)
    np.testing.assert_allclose(mix.comb[0].sum(axis=0), 0.999999, atol=5e-7)
    assert not np.allclose(mix.comb[0], mix.comb[0].T, atol=0.1)


def test_update_sums_over_the_source_streams(released):
    comb = np.zeros((1, 3, 3), np.float32)
    comb[0, 0, 2] = 1  # source 0 goes to destination 2
    streams = np.arange(6, dtype=np.float32).reshape(1, 3, 2) + 1
    mix = hyper.Mixes(jnp.float32([[1, 0, 2]]), jnp.float32([[10, 0, 0]]), jnp.asarray(comb))
    out = jnp.ones((1, 1, 2), jnp.float32)
    got = hyper.update(Setup(released), out, jnp.asarray(streams), mix)
    np.testing.assert_array_equal(got.streams[0], [[10, 10], [0, 0], [1, 2]])
    np.testing.assert_array_equal(got.pre, mix.pre)
    np.testing.assert_array_equal(got.collapsed, [[12, 14]])  # of the new streams
    np.testing.assert_allclose(got.mean_square, [205 / 6], rtol=1e-6)
    entered = hyper.hidden(got.streams, mix.pre)
    jax.tree.map(np.testing.assert_array_equal, entered, got)


def test_index_format():
    x = np.array([0.1 * (i - 15.5) * (-1 if i % 3 == 0 else 1) for i in range(32)], np.float32)
    stored = quant.store_index(jnp.asarray(x)[None], True)
    assert np.asarray(stored[1]).astype(np.float32).item() == 0.5
    got = np.asarray(quant.load_index(stored, jnp.dtype("float32")))[0]
    assert got[:8].tolist() == [1.5, -1.5, -1.5, 1, -1, -1, 1, -0.75]


MIDPOINTS = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.46875, 0.234375, 13.0, 2.0**-9])
def test_e2m1_midpoints_go_to_the_even_code(scale, compiled):
    """With scales that are no powers of two as well: 1.171875 / 0.234375 is 5 exactly."""

    def round_trip(x):
        return quant.load_entry(quant.store_entry(x, True), jnp.dtype("float32"))

    run = jax.jit(round_trip) if compiled else round_trip
    mid = np.array([*MIDPOINTS, *(-m for m in MIDPOINTS)], np.float32)
    x = np.zeros(16, np.float32)
    x[:14], x[15] = mid * np.float32(scale), 6 * scale
    want = np.array([*MIDPOINTS.values(), *(-m for m in MIDPOINTS.values())]) * scale
    got = np.asarray(run(jnp.asarray(x)[None]))[0]
    np.testing.assert_array_equal(got[:14], want)


def test_cache_formats_equal_the_definition():
    """Random rows over 20 binades, zeros and outliers against tables of all codes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 64)) * np.exp2(rng.integers(-12, 9, (500, 1)))
    x = x * np.exp2(rng.integers(-6, 2, (500, 64)))
    x[0], x[1, 0], x[2, :32] = 0, 1e-30, 0
    for dtype in (np.float32, ml_dtypes.bfloat16):
        rows = x.astype(dtype)
        wide = rows.astype(np.float64)
        for store, load, plain in (
            (quant.store_window, quant.load_window, plain_formats.fp8_groups),
            (quant.store_entry, quant.load_entry, plain_formats.fp4_entries),
            (quant.store_index, quant.load_index, plain_formats.fp4_groups),
        ):
            stored = jax.jit(lambda v, store=store: store(v, True))(jnp.asarray(rows))
            got = np.asarray(load(stored, jnp.dtype("float32")))
            np.testing.assert_array_equal(got, plain(wide), err_msg=store.__name__)


def test_cache_scales_saturate():
    """An entry beyond the format's range is clamped; it must not become NaN for every reader."""
    x = jnp.full((1, 32), 1e5, jnp.float32)
    got = quant.load_entry(quant.store_entry(x, True), jnp.dtype("float32"))
    np.testing.assert_array_equal(got, np.full((1, 32), 448 * 6))


def test_all_codes_on_the_device():
    """256 e4m3, 256 e8m0 (byte 0 is 2^-127, 255 is NaN) and 16 e2m1 codes."""
    codes = np.arange(256, dtype=np.uint8)
    e4m3 = jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)
    got = np.asarray(e4m3.astype(jnp.float32))
    np.testing.assert_array_equal(got, plain_formats.decode_e4m3(codes))
    assert np.signbit(got[128]) and np.isnan(got[[127, 255]]).all() and got[126] == 448
    e8m0 = np.asarray(formats.decode_e8m0(jnp.asarray(codes)))
    np.testing.assert_array_equal(e8m0, plain_formats.decode_e8m0(codes).astype(np.float32))
    assert e8m0[0] == np.float32(2.0**-127) != 0 and np.isnan(e8m0[255]) and e8m0[134] == 128
    packed = (np.arange(16) | (np.arange(16)[::-1] << 4)).astype(np.uint8)
    got = np.asarray(formats.decode_e2m1(jnp.asarray(packed)))
    assert got[::2].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    np.testing.assert_array_equal(got, plain_formats.decode_e2m1(packed))


def test_activation_scales():
    """Amax 0, tiny, at and just above a power of two; 448 stays itself, nothing saturates."""
    for amax, scale in (
        (0.0, 2.0**-22),
        (1e-45, 2.0**-22),
        (1e-4, 2.0**-22),
        (448.0, 1.0),
        (np.nextafter(np.float32(448), np.float32(500)), 2.0),
        (0.006975, 2.0**-15 * 2),
        (448 * 2.0**20, 2.0**20),
    ):
        x = np.zeros((1, 32), np.float32)
        x[0, 5] = amax
        values, found = formats.quantise_activations(jnp.asarray(x))
        bits = np.asarray(found).view(np.uint32)
        assert (bits & 0x7FFFFF == 0).all() and np.isfinite(np.asarray(values, np.float32)).all()
        want = plain_formats.power_above(
            np.float64(np.float32(max(np.float32(amax), np.float32(1e-4))) * np.float32(1 / 448))
        )
        assert found[0, 0] == want, amax
        if amax != 0.006975:
            assert found[0, 0] == scale, amax


@pytest.mark.parametrize(("cache_qdq", "size"), [(True, 890), (False, 3200)])
def test_cache_bytes_a_token(released, cache_qdq, size):
    """Global KV: compressed entries and index keys of layers 2, 8, 14 (half an entry) and 20."""
    numerics = Numerics.preset("reference", cache_qdq=cache_qdq)
    declared = cache.abstract(released, numerics, slots=1, pages=1)
    paged = jax.tree.leaves((declared.entries, declared.keys))
    assert sum(leaf.nbytes for leaf in paged) == size * cache.PAGE


def test_ring_bytes(released):
    """A window row is 528 bytes as stored, 40 layers and 3 draft stages."""
    declared = cache.abstract(released, Numerics.preset("reference"), slots=1, pages=1)
    ring = cache.ring_size(released)
    assert ring == 136 and len(declared.window) == 40 and len(declared.draft) == 3
    assert declared.classes.shape == (1, 16)
    assert [leaf and leaf.shape for leaf in declared.open] == [(1, 8, 2, 512)] * 3 + [None]
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(declared.window)) == 40 * ring * 528
