"""Compare the tensors that are there with those the config declares, one line a kind of finding.

96,085 tensors can be wrong in 96,085 ways, so findings are folded: a whole expert or a whole layer
becomes one name, equal names that differ in numbers become one line with the ranges of the numbers,

    missing: layers.{0-39}.ffn.experts.{272-383}.* (config.json: n_routed_experts = 384)

and scales that fit other blocks than config.json claims say so. Every declared tensor must be there
with its shape and dtype, and nothing else may be: an unread tensor is as wrong as a missing one.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

from converters.names import Entry, Table
from deepinfer_jax.config import ModelConfig

_LAYER = re.compile(r"^((?:layers|mtp|vision\.blocks)\.\d+)\.")
_EXPERT = re.compile(r"^((?:layers|mtp)\.\d+\.ffn\.experts\.\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # not the 1 of `w1`
_WHOLE_EXPERT = 3  # tensors: the weights of w1, w2, w3, with or without scales
_WHOLE_LAYER = 8  # kinds of tensors; the smallest block (of the vision tower) has that many


@dataclasses.dataclass(frozen=True)
class Found:
    """What the census knows of a tensor that is there."""

    dtype: str
    shape: tuple[int, ...]


def compare(cfg: ModelConfig, table: Table, tensors: Mapping[str, Found]) -> list[str]:
    """All differences; an empty list means every tensor is accounted for exactly once."""
    missing = [name for name in table.by_name if name not in tensors]
    unknown = [name for name in tensors if name not in table.by_name]
    if len(missing) == len(table.by_name):
        return [f"no tensor of this config is there; the files hold {_some(unknown)}"]
    return [
        *_lines(cfg, "missing", missing),
        *_lines(cfg, "unknown", unknown),
        *_differing(cfg, table, tensors),
    ]


def fold(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by what they say together: `layers.{3,5}.attn.wkv.weight`, `layers.{9}.*`."""
    folded = {name: name for name in names}
    for part, enough in ((_EXPERT, _WHOLE_EXPERT), (_LAYER, _WHOLE_LAYER)):
        groups: dict[str, set[str]] = collections.defaultdict(set)
        for name in folded.values():
            if match := part.match(name):
                groups[match[1]].add(_NUMBER.sub("#", name))
        for name, now in folded.items():
            if (match := part.match(now)) and len(groups[match[1]]) >= enough:
                folded[name] = f"{match[1]}.*"
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for name, now in folded.items():
        kinds[_NUMBER.sub("#", now)].append(name)
    return {_spelled(kind, [folded[n] for n in group]): group for kind, group in kinds.items()}


def _spelled(kind: str, names: list[str]) -> str:
    """One name for names of one kind, with the ranges their numbers cover."""
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    for column in columns:
        kind = kind.replace("#", f"{{{ranges(sorted(set(column)))}}}", 1)
    return kind


def _lines(cfg: ModelConfig, label: str, names: list[str]) -> Iterator[str]:
    for said, group in fold(names).items():
        count = f" ({len(group)} tensors)" if len(group) > 1 else ""
        yield f"{label}: {said}{count}{_claim(cfg, said)}"


def _claim(cfg: ModelConfig, said: str) -> str:
    """The config field that a folded name contradicts, where it is a matter of numbers."""
    draft = said.startswith("mtp.")
    if not said.endswith("}.*"):
        return ""
    if "experts.{" in said:
        field = "dspark_n_routed_experts" if draft else "n_routed_experts"
    elif said.startswith(("layers.", "mtp.")):
        field = "num_nextn_predict_layers" if draft else "num_hidden_layers"
    else:
        return ""
    return f"; config.json has {field} = {getattr(cfg, field)}"


def _differing(cfg: ModelConfig, table: Table, tensors: Mapping[str, Found]) -> Iterator[str]:
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for name, entry in table.by_name.items():
        if name in tensors and (problem := _differs(cfg, entry, tensors[name], tensors)):
            groups[problem].append(name)
    for problem, names in groups.items():
        yield f"{_some(list(fold(names)))}: {problem}"


def _differs(
    cfg: ModelConfig, entry: Entry, tensor: Found, tensors: Mapping[str, Found]
) -> str | None:
    if tensor.dtype != entry.dtype:
        return f"dtype {tensor.dtype}, expected {entry.dtype}"
    if tensor.shape == entry.shape:
        return None
    expected = f"shape {list(tensor.shape)}, expected {list(entry.shape)}"
    weight = tensors.get(entry.name.removesuffix(".scale") + ".weight")
    block = cfg.weight_block_size
    if not entry.name.endswith(".scale") or weight is None or weight.dtype != "F8_E4M3":
        return expected
    fits = [b for b in (16, 32, 64, 128, 256) if _blocks(weight.shape, b) == tensor.shape]
    which = f"blocks of {fits[0]}x{fits[0]}" if fits else "no square block"
    return f"{expected}: it fits {which}, config.json has weight_block_size = {list(block)}"


def _blocks(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    return tuple(-(-size // block) for size in shape)


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _some(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
