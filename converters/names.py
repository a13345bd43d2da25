"""The name table: official tensor name <-> (leaf of the weights tree, index in the stacked leaf).

The tree is declared once, in the model (`transformer.abstract`); this table only says how each
declared leaf is spelled in a checkpoint, so shapes, dtypes and the census follow from declarations:

    layers/3/attn/wq_a/values  [1280, 5120]           layers.3.attn.wq_a.weight
    layers/3/attn/wq_a/scales  [40, 160]              layers.3.attn.wq_a.scale
    layers/3/ffn/w13/values    [384, 2, 2304, 2560]   layers.3.ffn.experts.{e}.w1|w3.weight
    draft/stages/0/hc_ffn/fn   [24, 20480]            mtp.0.hc_ffn_fn

Routed experts are the stacked leaves: the leading axes of a leaf are the `index` of a tensor. The
table is a bijection, and building it fails if two leaves claim one name. Names: reference
inference/model.py and convert.py; packed FP4 is I8 in the file and uint8 in the tree.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from converters import safetensors_io as st
from deepinfer_jax import spec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import transformer

# Leaf of a block -> stem. A stem without a trailing "." takes ".weight" / ".scale"; with one, the
# leaf is spelled exactly so.
_BLOCK = {
    "hc_attn/fn": "hc_attn_fn.",
    "hc_attn/base": "hc_attn_base.",
    "hc_attn/scale": "hc_attn_scale.",
    "attn_norm": "attn_norm",
    "attn/wq_a": "attn.wq_a",
    "attn/q_norm": "attn.q_norm",
    "attn/wq_b": "attn.wq_b",
    "attn/wkv": "attn.wkv",
    "attn/kv_norm": "attn.kv_norm",
    "attn/wo_a": "attn.wo_a",
    "attn/wo_b": "attn.wo_b",
    "attn/sink": "attn.attn_sink.",
    "attn/compressor/wkv": "attn.compressor.wkv",
    "attn/compressor/wgate": "attn.compressor.wgate",
    "attn/compressor/norm": "attn.compressor.norm",
    "attn/indexer/wq_b": "attn.indexer.wq_b",
    "attn/indexer/weights_proj": "attn.indexer.weights_proj",
    "attn/indexer/wk": "attn.indexer.wk",
    "attn/indexer/k_norm": "attn.indexer.k_norm",
    "hc_ffn/fn": "hc_ffn_fn.",
    "hc_ffn/base": "hc_ffn_base.",
    "hc_ffn/scale": "hc_ffn_scale.",
    "ffn_norm": "ffn_norm",
    "ffn/gate": "ffn.gate",
    "ffn/bias": "ffn.gate.bias.",
    "ffn/bias_vl": "ffn.gate.bias_vl.",
    "ffn/shared_w1": "ffn.shared_experts.w1",
    "ffn/shared_w2": "ffn.shared_experts.w2",
    "ffn/shared_w3": "ffn.shared_experts.w3",
    "engram/table": "engram.embed",
    "engram/wkv": "engram.wkv",
    "engram/q_weight": "engram.q_weight.",
    "engram/k_weight": "engram.k_weight.",
}
_TOP = {
    "embed": "embed",
    "head": "head",
    "norm": "norm",
    "image_start": "image_start.",
    "image_end": "image_end.",
    "image_newline": "image_newline.",
}
# Leaf of the drafter -> stem; "<" stands for the first stage, ">" for the last.
_DRAFT = {
    "main_proj": "mtp.<.main_proj",
    "main_norm": "mtp.<.main_norm",
    "norm": "mtp.>.norm",
    "markov_embed": "mtp.>.markov_head.embed",
    "markov_head": "mtp.>.markov_head.head",
    "confidence": "mtp.>.confidence_head.proj",
}
_VISION = {
    "patch": "vision.patch_embed.proj",
    "patch_bias": "vision.patch_embed.proj.bias.",
    "norm": "vision.norm",
    "aligner_w1": "aligner.w1",
    "aligner_w1_bias": "aligner.w1.bias.",
    "aligner_w2": "aligner.w2",
    "aligner_w2_bias": "aligner.w2.bias.",
}
_VISION_BLOCK = {
    "norm1": "norm1",
    "norm2": "norm2",
    "wqkv": "attn.wqkv",
    "wqkv_bias": "attn.wqkv.bias.",
    "wo": "attn.wo",
    "wo_bias": "attn.wo.bias.",
    "w1": "mlp.w1",
    "w2": "mlp.w2",
}
# Numbered part of the tree -> (its official prefix, the stems of its leaves).
_NUMBERED = {
    "layers": ("layers", _BLOCK),
    "draft/stages": ("mtp", _BLOCK),
    "vision/blocks": ("vision.blocks", _VISION_BLOCK),
}
# Stacked leaf of a block -> projections along its second axis (one: there is no such axis).
_EXPERTS = {"ffn/w13": ("w1", "w3"), "ffn/w2": ("w2",)}
_PATH = re.compile(r"^(layers|draft/stages|vision/blocks)/(\d+)/(.+)$")
_DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "uint8": "I8",
    "bfloat16": "BF16",
    "float32": "F32",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor: `leaf[index]` is it. dtype: as spelled in a safetensors header."""

    name: str
    leaf: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return st.nbytes(self.dtype, self.shape)


@dataclasses.dataclass(frozen=True)
class Table:
    """All tensors of a config: entries by official name, and by leaf in stacking order."""

    params: Mapping[str, spec.Param]
    by_name: Mapping[str, Entry]
    by_leaf: Mapping[str, tuple[Entry, ...]]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.by_name.values())

    def only(self, leaves: Iterable[str]) -> "Table":
        """The part of the table that these leaves hold."""
        by_leaf = {leaf: self.by_leaf[leaf] for leaf in leaves}
        by_name = {entry.name: entry for entries in by_leaf.values() for entry in entries}
        return Table({leaf: self.params[leaf] for leaf in by_leaf}, by_name, by_leaf)


def table(cfg: ModelConfig) -> Table:
    """The bijection of a config, from the model's declarations alone."""
    params = spec.flatten(transformer.abstract(cfg))
    by_leaf = {path: tuple(_entries(cfg, path, param)) for path, param in params.items()}
    by_name = {entry.name: entry for entries in by_leaf.values() for entry in entries}
    if len(by_name) != sum(map(len, by_leaf.values())):
        raise ValueError("two leaves of the declarations claim one tensor name")
    return Table(params, by_name, by_leaf)


def _entries(cfg: ModelConfig, path: str, param: spec.Param) -> Iterator[Entry]:
    dtype = _DTYPES[np.dtype(param.dtype).name]
    part = path.rpartition("/")[2]
    leaf = path.removesuffix(f"/{part}") if part in ("values", "scales") else path
    suffix = ".scale" if part == "scales" else ".weight"
    stem, projections = _spell(cfg, leaf)
    if projections is None:
        name = stem[:-1] if stem.endswith(".") else stem + suffix
        yield Entry(name, path, (), param.shape, dtype)
        return
    stack = 1 if len(projections) == 1 else 2
    for index in np.ndindex(param.shape[:stack]):
        projection = projections[index[1] if stack == 2 else 0]
        name = f"{stem}.ffn.experts.{index[0]}.{projection}{suffix}"
        yield Entry(name, path, index, param.shape[stack:], dtype)


def _spell(cfg: ModelConfig, path: str) -> tuple[str, tuple[str, ...] | None]:
    """Stem of a leaf, and the projections it stacks (None: not a stacked leaf)."""
    match = _PATH.match(path)
    head, _, rest = path.partition("/")
    stem = _TOP.get(path)
    if match:
        prefix, stems = _NUMBERED[match[1]]
        if match[3] in _EXPERTS and stems is _BLOCK:
            return f"{prefix}.{match[2]}", _EXPERTS[match[3]]
        stem = stems.get(match[3]) and f"{prefix}.{match[2]}.{stems[match[3]]}"
    elif head == "draft" and rest in _DRAFT:
        last = str(cfg.num_nextn_predict_layers - 1)
        stem = _DRAFT[rest].replace("<", "0").replace(">", last)
    elif head == "vision":
        stem = _VISION.get(rest)
    if stem is None:
        raise KeyError(f"no official name for the declared leaf {path!r}")
    return stem, None


def stored(entry: Entry, data: np.ndarray) -> np.ndarray:
    """Bytes of a tensor as the leaf holds them: the same bits, packed FP4 seen as uint8."""
    return data.view(np.uint8) if entry.dtype == "I8" else data


def parameters(params: Mapping[str, spec.Param], prefix: str = "") -> int:
    """Weights under a path, counted as numbers: two for a byte of FP4, none for a scale."""
    total = 0
    for path, param in params.items():
        if path.startswith(prefix) and not path.endswith("/scales"):
            total += math.prod(param.shape) * (2 if param.dtype == "uint8" else 1)
    return total


def under(leaf: str, prefixes: Iterable[str]) -> bool:
    """Whether a leaf is one of these paths of the tree, or lies under one."""
    return any(leaf == prefix or leaf.startswith(prefix.rstrip("/") + "/") for prefix in prefixes)
