"""A checkpoint in the official on-disk format as float64 matrices, read without our packages.

`Checkpoint(folder)[stem]` gives a tensor by its official name (`layers.3.attn.wq_a` or
`layers.3.attn_norm`, without `.weight`), dequantised by what is stored: FP8 with a scale for a
block of 32 x 32, packed FP4 and the Engram table with a scale for 32 columns of a row, or plain.
"""

import json
import struct
from pathlib import Path

import numpy as np

from tests.oracle import formats

BYTES = {
    **dict.fromkeys(("U8", "I8", "BOOL", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("BF16", "I16"), 2),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F64", "I64"), 8),
}


def read_safetensors(file: Path) -> dict[str, tuple[str, np.ndarray]]:
    """name -> (dtype as safetensors spells it, raw bytes shaped [..., itemsize])."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        raw = np.frombuffer(data[begin:end], np.uint8)
        found[name] = entry["dtype"], raw.reshape(*entry["shape"], BYTES[entry["dtype"]])
    return found


def plain(dtype: str, raw: np.ndarray) -> np.ndarray:
    """An unquantised tensor in its own type; bfloat16 becomes float32."""
    if dtype == "BF16":
        return (raw.view("<u2")[..., 0].astype(np.uint32) << 16).view(np.float32)
    kinds = {"F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8", "I16": "<i2"}
    if dtype in ("U8", "I8", "BOOL"):
        return raw[..., 0]
    return raw.view(kinds[dtype])[..., 0]


class Checkpoint:
    """Tensors and numbers of one model folder; `config` holds text_config over the top level."""

    def __init__(self, folder: Path) -> None:
        whole = json.loads((folder / "config.json").read_text())
        self.config = {**whole, **whole["text_config"]}
        self.stored: dict[str, tuple[str, np.ndarray]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.stored |= read_safetensors(file)

    def __contains__(self, stem: str) -> bool:
        return stem in self.stored or f"{stem}.weight" in self.stored

    def __getitem__(self, stem: str) -> np.ndarray:
        name = stem if stem in self.stored else f"{stem}.weight"
        dtype, raw = self.stored[name]
        if dtype not in ("F8_E4M3", "I8"):
            return plain(dtype, raw).astype(np.float64)
        scale = formats.decode_e8m0(self.stored[f"{stem}.scale"][1][..., 0])
        if dtype == "I8":
            values = formats.decode_e2m1(raw[..., 0])
            return values * np.repeat(scale, 32, axis=1)
        values = formats.decode_e4m3(raw[..., 0])
        if not stem.endswith("engram.embed"):
            scale = np.repeat(scale, 32, axis=0)[: values.shape[0]]
        return values * np.repeat(scale, 32, axis=1)[:, : values.shape[1]]
