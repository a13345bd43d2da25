"""Writes trained weights in the official on-disk format.

One safetensors file with an index, config.json and the tokenizer's two files: a folder that every
reader of the release's format can take. The bits are those of `stored.packed`.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from converters import names
from converters import safetensors_io as st
from converters.recipes import raw
from converters.source import INDEX
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.demo import stored
from deepinfer_jax.demo.run import Flat, declared
from deepinfer_jax.spec import Quantized

FILE = "model-00001-of-00001.safetensors"
BESIDE = ("config.json", "tokenizer.json", "tokenizer_config.json")


def write(folder: Path, beside: Path, cfg: ModelConfig, params: Flat) -> int:
    """Writes the checkpoint folder, replacing one that is there only when the new one is whole; its
    bytes. beside: where config and tokenizer lie."""
    made, before = folder.with_name(folder.name + ".part"), folder.with_name(folder.name + ".old")
    for left in (made, before):
        shutil.rmtree(left, ignore_errors=True)
    made.mkdir(parents=True)
    leaves: dict[str, np.ndarray] = {}
    for name, leaf in declared(cfg).items():
        value = jax.device_get(stored.packed(params[name], leaf))
        if isinstance(value, Quantized):
            leaves[f"{name}/values"], leaves[f"{name}/scales"] = value.values, value.scales
        else:
            leaves[name] = value
    table = names.table(cfg)
    entries = list(table.by_name.values())

    def chunks() -> Iterator[memoryview]:
        for entry in entries:
            yield raw(np.ascontiguousarray(leaves[entry.leaf][entry.index]))

    header = st.header_bytes([(e.name, e.dtype, e.shape) for e in entries], {"format": "pt"})
    st.write(made / FILE, header, chunks())
    index = {
        "metadata": {"total_size": table.nbytes},
        "weight_map": {entry.name: FILE for entry in entries},
    }
    (made / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    for name in BESIDE:
        shutil.copyfile(beside / name, made / name)
    if folder.exists():
        folder.rename(before)
    made.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
    return sum(file.stat().st_size for file in folder.iterdir())
