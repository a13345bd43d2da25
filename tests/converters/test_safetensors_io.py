"""The safetensors reader and writer: every dtype, every byte value, every way a file can be bad."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from converters import safetensors_io as st

READABLE = [name for name, (_, kind) in st.DTYPES.items() if kind is not None]


def _file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("dtype", READABLE)
def test_every_dtype_through_every_path(tmp_path, dtype):
    """Whole reads, row slices, byte ranges and mapped views give the bytes that were written."""
    shape = (6, 4, 2)
    values = np.random.default_rng(0).integers(0, 2, st.nbytes(dtype, shape), np.uint8)
    if dtype != "BOOL":
        values = np.random.default_rng(0).integers(0, 256, len(values), np.uint8)
    header = st.header_bytes([("before", "U8", (3,)), ("x", dtype, shape)])
    file = tmp_path / "x.safetensors"
    st.write(file, header, [b"abc", values])
    tensor = st.read_header(file).tensors["x"]
    with st.Reader() as reader:
        whole, view = reader.read(tensor), reader.view(tensor)
        rows = np.concatenate([reader.read(tensor, b, e) for b, e in st.row_slices(6, 1, 4)])
        raw = np.empty(5, np.uint8)
        reader.read_into(tensor, memoryview(raw), 7)
    for read in (whole, view, rows):
        assert read.tobytes() == values.tobytes()
        assert read.dtype == whole.dtype and read.shape == whole.shape
    assert raw.tobytes() == values[7:12].tobytes()
    assert whole.shape == ((6, 4, 1) if dtype == "F4" else shape)
    assert not view.flags.writeable


def test_all_codes_decode_exactly(tmp_path):
    """All 256 e4m3 (fn) and e8m0 codes, from their definition; F8_E4M3 is not the IEEE-like one."""
    codes = np.arange(256, dtype=np.uint8)
    file = tmp_path / "codes.safetensors"
    header = st.header_bytes([("e4m3", "F8_E4M3", (256,)), ("e8m0", "F8_E8M0", (256,))])
    st.write(file, header, [codes, codes])
    tensors = st.read_header(file).tensors
    with st.Reader() as reader:
        e4m3 = reader.read(tensors["e4m3"]).astype(np.float64)
        e8m0 = reader.read(tensors["e8m0"]).astype(np.float64)
    for code in range(256):
        sign, exponent, mantissa = -1 if code & 128 else 1, (code >> 3) & 15, code & 7
        if code & 127 == 127:
            assert np.isnan(e4m3[code])
        elif exponent:
            assert e4m3[code] == sign * 2.0 ** (exponent - 7) * (1 + mantissa / 8)
        else:
            assert e4m3[code] == sign * 2.0**-6 * mantissa / 8
            assert np.signbit(e4m3[code]) == (sign < 0)
        if code < 255:
            assert e8m0[code] == 2.0 ** (code - 127)
    assert np.isnan(e8m0[255])
    assert (e4m3[0x7E], e4m3[0x01], e8m0[134]) == (448, 2.0**-9, 128)
    assert np.float32(ml_dtypes.float8_e8m0fnu(2.0**-127)) == np.float32(2.0**-127) != 0


TRUNCATED = "truncated"
BAD = {
    "empty": (lambda p: p.write_bytes(b""), TRUNCATED),
    "short prefix": (lambda p: p.write_bytes(b"\x01\x02"), TRUNCATED),
    "header cut": (lambda p: _file(p, b"{}", length=100), TRUNCATED),
    "huge length": (lambda p: _file(p, b"{}", length=2**60), "bad header length"),
    "zero length": (lambda p: _file(p, b"{}  ", length=0), "bad header length"),
    "not json": (lambda p: _file(p, b"{nope}"), "not valid JSON"),
    "not utf-8": (lambda p: _file(p, b'{"\xff": 1}'), "not valid JSON"),
    "a list": (lambda p: _file(p, b"[1]"), "not a JSON object"),
    "duplicate": (
        lambda p: _file(p, b'{"a": %s, "a": %s}' % ((json.dumps(_entry()).encode(),) * 2), b"1234"),
        "duplicate name 'a'",
    ),
    "no dtype": (lambda p: _file(p, {"a": {"shape": [4]}}, b"1234"), "'a': expected dtype"),
    "unknown dtype": (lambda p: _file(p, {"a": _entry("F3_X")}, b"1234"), "unknown dtype 'F3_X'"),
    "negative shape": (lambda p: _file(p, {"a": _entry(shape=(-4,))}, b"1234"), "not a list of"),
    "boolean shape": (lambda p: _file(p, {"a": _entry(shape=(True, 4))}, b"1234"), "not a list of"),
    "reversed": (lambda p: _file(p, {"a": _entry(offsets=(4, 0))}, b"1234"), "data_offsets"),
    "size lies": (lambda p: _file(p, {"a": _entry("F32")}, b"1234"), "is 16 bytes"),
    "odd nibbles": (lambda p: _file(p, {"a": _entry("F4", (3,), (0, 2))}, b"12"), "whole bytes"),
    "data cut": (lambda p: _file(p, {"a": _entry()}, b"123"), "'a': truncated"),
    "overlap": (
        lambda p: _file(p, {"a": _entry(), "b": _entry(offsets=(2, 6))}, b"123456"),
        "'a' and 'b' overlap",
    ),
    "hole": (lambda p: _file(p, {"a": _entry(offsets=(1, 5))}, b"12345"), "belong to none"),
    "tail": (lambda p: _file(p, {"a": _entry()}, b"12345"), "1 bytes after the last tensor"),
    "gguf": (lambda p: p.write_bytes(b"GGUF" + bytes(20)), "a GGUF file"),
    "lfs pointer": (lambda p: p.write_bytes(b"version https://git-lfs"), "git-lfs pointer"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_in_one_line(tmp_path, case):
    make, message = BAD[case]
    file = tmp_path / "bad.safetensors"
    make(file)
    with pytest.raises(st.FormatError) as caught:
        st.read_header(file)
    text = str(caught.value)
    assert message in text and str(file) in text and "\n" not in text
    assert "corrupt" not in text


def test_known_but_unreadable_dtype_is_counted(tmp_path):
    file = _file(tmp_path / "x", {"a": _entry("F6_E2M3", (4,), (0, 3))}, b"123")
    tensor = st.read_header(file).tensors["a"]
    assert tensor.nbytes == 3
    with st.Reader() as reader, pytest.raises(ValueError, match="can be counted and copied"):
        reader.read(tensor)


def test_empty_tensors_and_metadata(tmp_path):
    file = tmp_path / "x.safetensors"
    header = st.header_bytes([("none", "F32", (0, 4)), ("one", "I64", ())], {"format": "pt"})
    st.write(file, header, [np.int64(7).tobytes()])
    found = st.read_header(file)
    assert found.metadata == {"format": "pt"} and found.raw == header
    with st.Reader() as reader:
        assert reader.read(found.tensors["none"]).shape == (0, 4)
        assert reader.read(found.tensors["one"]) == 7


def test_writer_refuses_what_does_not_add_up(tmp_path):
    header = st.header_bytes([("a", "F32", (2,))])
    with pytest.raises(st.FormatError, match="truncated"):
        st.write(tmp_path / "short", header, [b"1234"])
    with pytest.raises(ValueError, match="'a' is written twice"):
        st.header_bytes([("a", "U8", (1,)), ("a", "U8", (1,))])
