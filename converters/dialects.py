"""Checkpoints that are not spelled like the release: told apart by names, dtypes and shapes.

The same model is published under other names (`model.layers.3.self_attn.q_a_proj`), with experts
stacked, with scales as floats, or partly dequantised. `canonical` gives every source tensor its
official name, so that the rest of the converters know one spelling; `storage` says from the tensors
how matrices are kept, whatever config.json claims. Formats that hold other numbers than ours can
(`foreign`) are refused by name with the reason, never listed as a thousand unknown tensors.

Spellings: the released names; the names of transformers' `deepseek_v4` (with `model.`,
`model.language_model.` or no prefix); `weight_scale_inv` and `weight_scale` for `scale`.
"""

import dataclasses
import re
from collections.abc import Container, Iterator, Mapping

from converters import safetensors_io as st
from converters.names import Table

PACKED = ("I8", "U8", "F4")
WIDE = ("BF16", "F16", "F32")

_RENAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(?:model\.language_model|language_model\.model|language_model|model)\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"\.(?:weight_scale_inv|weight_scale)$", ".scale"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
        (r"^((?:layers|mtp)\.\d+)\.self_attn\.", r"\1.attn."),
        (r"^((?:layers|mtp)\.\d+)\.mlp\.", r"\1.ffn."),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.attn\.compressor\.indexer\.", ".attn.indexer."),
        (r"\.attn\.compressor\.kv_norm\.", ".attn.compressor.norm."),
        (r"\.attn\.compressor\.gate_proj\.", ".attn.compressor.wgate."),
        (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
        (r"(\.attn\.(?:\w+\.)?)q_a_proj\.", r"\1wq_a."),
        (r"(\.attn\.(?:\w+\.)?)q_b_proj\.", r"\1wq_b."),
        (r"(\.attn\.(?:\w+\.)?)kv_proj\.", r"\1wkv."),
        (r"(\.attn\.(?:\w+\.)?)k_proj\.", r"\1wk."),
        (r"(\.attn\.(?:\w+\.)?)o_a_proj\.", r"\1wo_a."),
        (r"(\.attn\.(?:\w+\.)?)o_b_proj\.", r"\1wo_b."),
        (r"\.ffn\.gate\.e_score_correction_bias$", ".ffn.gate.bias"),
        (r"(experts(?:\.\d+)?)\.gate_proj\.", r"\1.w1."),
        (r"(experts(?:\.\d+)?)\.down_proj\.(?=weight$|scale$)", r"\1.w2."),
        (r"(experts(?:\.\d+)?)\.up_proj\.", r"\1.w3."),
    )
]
# Stacked experts: [experts, rows, columns], gate rows before up rows.
_STACKED = re.compile(
    r"^(?P<stem>(?:layers|mtp)\.\d+\.ffn\.experts)\.(?P<kind>gate_up_proj|down_proj)"
    r"(?P<scale>_scale_inv|_scale|\.scale)?(?:\.weight)?$"
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies: bytes [offset, ...) of a source tensor, which may hold several."""

    tensor: st.Tensor
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first axis."""
        return st.nbytes(self.dtype, self.shape) // max(1, self.shape[0])


def rename(name: str) -> str:
    """The official spelling of a tensor name (itself, if it is official or unknown)."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def canonical(
    tensors: Mapping[str, st.Tensor], official: Container[str] = ()
) -> tuple[dict[str, Stored], list[str]]:
    """Source tensors by official name, stacked experts taken apart; and clashes of names.

    official: names that need no look.
    """
    found: dict[str, Stored] = {}
    problems = []
    for source, tensor in tensors.items():
        spelled = source if source in official else rename(source)
        for name, stored in _parts(spelled, tensor):
            if name in found:
                first = found[name].tensor.name
                problems.append(f"{first} and {source} are both {name}")
            found[name] = stored
    return found, problems


def _parts(name: str, tensor: st.Tensor) -> Iterator[tuple[str, Stored]]:
    match = _STACKED.match(name) if len(tensor.shape) == 3 else None
    if match is None:
        yield name, Stored(tensor, 0, tensor.dtype, tensor.shape)
        return
    experts, rows, columns = tensor.shape
    kinds = ("w1", "w3") if match["kind"] == "gate_up_proj" else ("w2",)
    shape = (rows // len(kinds), columns)
    size = st.nbytes(tensor.dtype, shape)
    suffix = "scale" if match["scale"] else "weight"
    for number, (expert, kind) in enumerate((e, k) for e in range(experts) for k in kinds):
        part = Stored(tensor, number * size, tensor.dtype, shape)
        yield f"{match['stem']}.{expert}.{kind}.{suffix}", part


def foreign(tensors: Mapping[str, st.Tensor]) -> str | None:
    """Why a checkpoint in a format we know of cannot be converted; None if nothing says so."""
    ends = {name.rpartition(".")[2] for name in tensors}
    if {"scales", "biases"} <= ends:
        return "an MLX quantisation (packed weights with .scales and .biases), lossy; not supported"
    for end, what in (
        ("qweight", "an AutoRound or GPTQ quantisation (.qweight)"),
        ("weight_packed", "a compressed-tensors quantisation (.weight_packed)"),
        ("trellis", "an EXL3 quantisation (.trellis)"),
        ("qscale", "a quantisation with .qscale"),
    ):
        if end in ends:
            return f"{what}; not supported: convert the official checkpoint"
    if "weight_scale_2" in ends:
        return (
            "NVFP4 experts (e4m3 scales of 16 columns and a scale a tensor), which MXFP4 and "
            "bfloat16 cannot hold exactly; convert the official checkpoint"
        )
    if ends & {"tid2eid", "ape", "position_bias"}:
        return "DeepSeek-V4 tensors (tid2eid, ape), whatever config.json says; V4.1 has none"
    if any(re.search(r"\bmtp\.\d+\.(?:e_proj|h_proj|enorm|hnorm)\.", name) for name in tensors):
        return "the old next-token module of V3 and V4 (mtp.*.e_proj); V4.1 drafts with DSpark"
    if tensors and all(re.match(r"(?:model\.)?mtp\.", name) for name in tensors):
        return (
            "only a drafter (mtp.*): embedding, head and layers are the target model's; convert a "
            "full checkpoint"
        )
    if any(
        ".shared_experts." in name and name.endswith(".weight") and tensors[name].dtype in PACKED
        for name in tensors
    ):
        return "packed FP4 shared experts (AMD Quark MXFP4); not supported: the release keeps FP8"
    return None


def storage(table: Table, stored: Mapping[str, Stored]) -> dict[str, str]:
    """`dense_dtype` and `expert_dtype` that the tensors call for (the widest that occurs).

    table: of the same config with FP8 dense matrices. A mixture that no layout holds exactly
    (FP8 among packed experts) is left to the census, which names the odd tensors.
    """
    dense, experts = set(), set()
    for name, entry in table.by_name.items():
        if name in stored and name.endswith(".weight"):
            if ".experts." in name and ".shared_experts." not in name:
                experts.add(stored[name].dtype)
            elif entry.dtype == "F8_E4M3" and ".engram.embed." not in name:
                dense.add(stored[name].dtype)
    found = {"dense_dtype": "bf16" if dense & set(WIDE) else "fp8"}
    if experts & set(WIDE):
        found["expert_dtype"] = "bf16"
    elif experts & set(PACKED):
        found["expert_dtype"] = "fp4"
    else:
        found["expert_dtype"] = "fp8"
    return found
