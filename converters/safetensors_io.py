"""Read and write safetensors files: the header, byte ranges, row slices. No torch, no safetensors.

A file is  <u64 length> <JSON header, padded with spaces> <data>,  and the header maps each tensor
name to {dtype, shape, data_offsets}. `read_header` trusts nothing: every range is checked against
the file's size, so a truncated download, an overlap or a hole is named before any weight is read.
A dtype this table lacks is reported as unknown, never as a corrupt file.

Arrays come back in the dtype they are stored in (`ml_dtypes` for BF16 and the 8-bit floats). F4 is
two values a byte: it stays packed, as uint8 with half the last axis, like the release's I8 experts.
Format: https://github.com/huggingface/safetensors (README, "Format").
"""

import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

# Name -> (bits an element, numpy dtype; None: can be counted and copied, not computed with).
DTYPES: dict[str, tuple[int, Any]] = {
    "BOOL": (8, np.bool_),
    "F4": (4, np.uint8),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, np.uint8),
    "I8": (8, np.int8),
    "F8_E4M3": (8, ml_dtypes.float8_e4m3fn),
    "F8_E5M2": (8, ml_dtypes.float8_e5m2),
    "F8_E8M0": (8, ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": (8, ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (8, ml_dtypes.float8_e5m2fnuz),
    "I16": (16, np.int16),
    "U16": (16, np.uint16),
    "F16": (16, np.float16),
    "BF16": (16, ml_dtypes.bfloat16),
    "I32": (32, np.int32),
    "U32": (32, np.uint32),
    "F32": (32, np.float32),
    "I64": (64, np.int64),
    "U64": (64, np.uint64),
    "F64": (64, np.float64),
    "C64": (64, np.complex64),
}
MAX_HEADER = 100_000_000  # the limit of the format's own reader
READ_AHEAD = 2**16  # bytes from which a hint to the kernel pays


class FormatError(ValueError):
    """A file that is not a readable safetensors file; one line that names file and tensor."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: absolute byte range [start, start + nbytes) of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first axis (of everything, for a scalar)."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


@dataclasses.dataclass(frozen=True)
class Header:
    """The parsed header of one file, and its raw bytes (length prefix and padding included)."""

    file: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    raw: bytes


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor on disk; sub-byte dtypes must fill whole bytes."""
    bits = math.prod(shape) * DTYPES[dtype][0]
    if bits % 8:
        raise ValueError(f"{dtype} of shape {tuple(shape)} does not fill whole bytes")
    return bits // 8


def read_header(path: str | Path) -> Header:
    """Parse and check the header of `path`; reads nothing else.

    Raises `FormatError`: not a safetensors file (GGUF and git-lfs pointers by name), truncated, bad
    header length, not JSON, duplicate names, unknown dtype, sizes that disagree, overlap or hole.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = _raw_header(path, file, size)
    try:
        entries = json.loads(raw[8:], object_pairs_hook=_no_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FormatError(f"{path}: header is not valid JSON ({error})") from None
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from None
    if not isinstance(entries, dict):
        raise FormatError(f"{path}: header is not a JSON object")
    metadata = entries.pop("__metadata__", None) or {}
    tensors = {name: _tensor(path, name, entry, len(raw), size) for name, entry in entries.items()}
    _check_ranges(path, tensors.values(), len(raw), size)
    return Header(path, tensors, metadata, raw)


def _raw_header(path: Path, file: BinaryIO, size: int) -> bytes:
    prefix = file.read(8)
    if prefix[:4] == b"GGUF":
        raise FormatError(f"{path}: a GGUF file; expected safetensors")
    if prefix == b"version ":
        raise FormatError(f"{path}: a git-lfs pointer, not the data; run `git lfs pull`")
    if len(prefix) < 8:
        raise FormatError(f"{path}: truncated: {size} bytes, a header alone needs 8")
    (length,) = struct.unpack("<Q", prefix)
    if not 2 <= length <= MAX_HEADER:
        raise FormatError(
            f"{path}: bad header length {length}; expected 2 to {MAX_HEADER} "
            "(not a safetensors file, or its first bytes are damaged)"
        )
    if 8 + length > size:
        raise FormatError(f"{path}: truncated: {size} bytes, the header alone needs {8 + length}")
    return prefix + file.read(length)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate name {twice!r} in the header")
    return found


def _tensor(path: Path, name: str, entry: Any, data_start: int, size: int) -> Tensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise FormatError(f"{where}: expected dtype, shape and data_offsets, got {entry!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise FormatError(
            f"{where}: unknown dtype {dtype!r}; this reader knows {', '.join(DTYPES)}"
        )
    if not _counts(shape):
        raise FormatError(f"{where}: shape {shape!r} is not a list of sizes")
    if not (_counts(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise FormatError(f"{where}: data_offsets {offsets!r} are not [begin, end]")
    begin, end = offsets
    try:
        expected = nbytes(dtype, shape)
    except ValueError as error:
        raise FormatError(f"{where}: {error}") from None
    if end - begin != expected:
        raise FormatError(
            f"{where}: {dtype} of shape {tuple(shape)} is {expected} bytes, "
            f"data_offsets hold {end - begin}"
        )
    if data_start + end > size:
        raise FormatError(
            f"{where}: truncated: it ends at byte {data_start + end} of a file of {size}"
        )
    return Tensor(name, dtype, tuple(shape), path, data_start + begin, expected)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_ranges(path: Path, tensors: Iterable[Tensor], data_start: int, size: int) -> None:
    """The ranges must tile the data: no overlap, no hole, nothing after the last tensor."""
    end, last = data_start, None
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start < end and tensor.nbytes:
            raise FormatError(f"{path}: tensors {last!r} and {tensor.name!r} overlap")
        if tensor.start > end:
            raise FormatError(
                f"{path}: {tensor.start - end} bytes before tensor {tensor.name!r} belong to none"
            )
        end, last = max(end, tensor.start + tensor.nbytes), tensor.name
    if end != size:
        raise FormatError(f"{path}: {size - end} bytes after the last tensor belong to none")


class Reader:
    """Open files by need and read ranges of tensors with pread; files are opened read-only.

    Range reads touch no page they do not return and leave no mapping behind, so the resident
    memory of a conversion is its buffers; `view` maps the file for callers that want the pages.
    Safe to use from several threads. Close it, or use it as a context manager.
    """

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _descriptor(self, path: Path) -> int:
        # Two threads may both open; setdefault keeps one and the other is closed at once.
        if path not in self._files:
            opened = os.open(path, os.O_RDONLY)
            if self._files.setdefault(path, opened) != opened:
                os.close(opened)
        return self._files[path]

    def read_into(self, tensor: Tensor, out: memoryview, start: int = 0) -> None:
        """Fill `out` (bytes) with the tensor's bytes from byte `start` on."""
        if start + len(out) > tensor.nbytes:
            raise ValueError(f"{tensor.name}: bytes {start}+{len(out)} of {tensor.nbytes}")
        descriptor, done = self._descriptor(tensor.file), 0
        while done < len(out):
            count = os.preadv(descriptor, [out[done:]], tensor.start + start + done)
            if count == 0:
                raise FormatError(f"{tensor.file}: ended inside tensor {tensor.name!r}")
            done += count
        end = start + len(out)
        read_ahead(descriptor, tensor.start + end, min(len(out), tensor.nbytes - end))

    def read(self, tensor: Tensor, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Rows [begin, end) of the first axis (all of them by default) as a new array."""
        whole = end is None and begin == 0
        end = (tensor.shape[0] if tensor.shape else 1) if end is None else end
        count = tensor.nbytes if whole else (end - begin) * tensor.row_bytes
        buffer = np.empty(count, np.uint8)
        self.read_into(tensor, memoryview(buffer), 0 if whole else begin * tensor.row_bytes)
        shape = tensor.shape if whole else (end - begin, *tensor.shape[1:])
        return as_array(buffer, tensor.dtype, shape)

    def view(self, tensor: Tensor) -> np.ndarray:
        """The whole tensor as a read-only view of the mapped file."""
        if tensor.nbytes == 0:
            return as_array(np.empty(0, np.uint8), tensor.dtype, tensor.shape)
        mapped = np.memmap(
            tensor.file, np.uint8, mode="r", offset=tensor.start, shape=(tensor.nbytes,)
        )
        return as_array(mapped.view(np.ndarray), tensor.dtype, tensor.shape)


def read_ahead(descriptor: int, start: int, count: int) -> None:
    """Ask the kernel for bytes that will be read next, where it is worth a call."""
    if count >= READ_AHEAD and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_WILLNEED)


def as_array(data: np.ndarray, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Bytes as an array of a safetensors dtype; F4 stays packed (last axis halved)."""
    bits, kind = DTYPES[dtype]
    if kind is None:
        raise ValueError(f"dtype {dtype} can be counted and copied, but not read as an array")
    if bits == 4:
        if not shape or shape[-1] % 2:
            raise ValueError(
                f"F4 of shape {tuple(shape)}: the last axis must be even to stay packed"
            )
        shape = (*shape[:-1], shape[-1] // 2)
    return data.view(kind).reshape(shape)


def header_bytes(
    entries: Iterable[tuple[str, str, Sequence[int]]], metadata: dict[str, str] | None = None
) -> bytes:
    """The header block of a file whose data follows in the order of `entries` (name, dtype, shape).

    Compact JSON, padded with spaces to a multiple of 8, as the format's own writer does.
    """
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    begin = 0
    for name, dtype, shape in entries:
        if name in table:
            raise ValueError(f"tensor {name!r} is written twice")
        end = begin + nbytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write(path: str | Path, header: bytes, chunks: Iterable[Any]) -> int:
    """Stream one file: `header` (of `header_bytes`, or a raw one), then `chunks` of data.

    Returns the bytes written, after fsync. The header is read back: chunks that do not add up to
    what it declares raise `FormatError`. The caller names a temporary path and renames it.
    """
    path = Path(path)
    with path.open("wb") as file:
        total = file.write(header)
        for chunk in chunks:
            total += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    read_header(path)
    return total


def row_slices(rows: int, row_bytes: int, limit: int) -> Iterator[tuple[int, int]]:
    """Split `rows` into ranges of at most `limit` bytes (one row at least)."""
    step = max(1, limit // max(1, row_bytes))
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)
