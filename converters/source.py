"""A checkpoint folder of safetensors shards, opened read-only: config, index, headers.

`open_source` answers what is really there before any weight is read. It keeps apart what looks
alike: a shard the index names but the folder lacks, an index left over from other shards, and a
shard that is there but does not declare what the index places in it. All findings come back
together, one line each, in `CheckpointError.problems`.

A folder of links into a Hugging Face Hub cache works as it is, and so does a Hub id, through the
`hub` extra. Other containers (GGUF) are refused by name; other dialects of safetensors are told
apart by tensor names, in `dialects`.
"""

import collections
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from converters import dialects
from converters import safetensors_io as st
from deepinfer_jax.config import ModelConfig

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_SHARD_OF = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; `problems` has one line for each finding."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class LossWarning(UserWarning):
    """Something of a checkpoint is kept less exactly than it was stored."""


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened checkpoint: `tensors` by name, `headers` by file name, the config and its bytes."""

    path: Path
    cfg: ModelConfig
    config: dict[str, Any]
    headers: dict[str, st.Header]
    tensors: dict[str, st.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def identity(self) -> dict[str, Any]:
        """What names these bytes without reading them: sizes and digests of config and headers.

        Two folders with equal identity hold tensors of equal names, shapes and places; their bytes
        are compared by the sha256 that a conversion computes as they pass.
        """
        return {
            "model_type": self.config["model_type"],
            "revision": self.path.name if self.path.parent.name == "snapshots" else None,
            "tensors": len(self.tensors),
            "bytes": self.nbytes,
            "config_sha256": _sha256(self.path / "config.json"),
            "files": {
                name: {
                    "bytes": header.file.stat().st_size,
                    "header_sha256": hashlib.sha256(header.raw).hexdigest(),
                }
                for name, header in sorted(self.headers.items())
            },
        }

    def times(self) -> dict[str, int]:
        """When each shard was last written, ns; a change means other bytes under one identity."""
        return {name: header.file.stat().st_mtime_ns for name, header in self.headers.items()}


def resolve(path_or_id: str | Path, revision: str | None = None) -> Path:
    """A local folder as it is; a Hub id (`owner/name`) downloaded or found in the Hub cache.

    Raises `CheckpointError` saying what to do where the extra or the network is missing.
    """
    path = Path(path_or_id)
    if path.exists() or not _HUB_ID.match(str(path_or_id)):
        return path
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            [
                f"{path_or_id}: no such folder; to fetch it as a Hugging Face Hub id, "
                "install the extra: pip install 'deepinfer-jax[hub]'"
            ]
        ) from None
    wanted = ["*.safetensors", INDEX, "config.json", *TOKENIZER_FILES]
    try:
        found = huggingface_hub.snapshot_download(
            str(path_or_id), revision=revision, allow_patterns=wanted
        )
    except Exception as error:  # every transport of the hub client raises its own kind
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            [
                f"{path_or_id}: no such folder, and the Hugging Face Hub did not give it "
                f"({type(error).__name__}: {reason}); give a local folder, or check the network"
            ]
        ) from None
    return Path(found)


def open_source(path: str | Path) -> Source:
    """Open a checkpoint folder; raises `CheckpointError` with every finding of config and files."""
    path = Path(path)
    problems: list[str] = []
    if not path.is_dir():
        what = "not a folder" if path.exists() else "no such folder"
        raise CheckpointError(
            [f"{path}: {what}; expected a folder with config.json and *.safetensors"]
        )
    cfg = config = None
    try:
        cfg = ModelConfig.from_json(path / "config.json")
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        problems.append(str(error))
    headers, tensors, more = read_shards(path)
    if reason := dialects.foreign(tensors):
        raise CheckpointError([f"{path}: {reason}"])
    problems += more
    if problems or cfg is None or config is None:
        raise CheckpointError(problems)
    return Source(path, cfg, config, headers, tensors)


def read_shards(
    path: Path,
) -> tuple[dict[str, st.Header], dict[str, st.Tensor], list[str]]:
    """Headers by file name, tensors by name, and the problems of index and files."""
    present = sorted(file.name for file in path.glob("*.safetensors"))
    try:
        placed, total, problems = _read_index(path / INDEX), None, []
        if placed is not None:
            placed, total = placed
    except ValueError as error:
        return {}, {}, [str(error)]
    if not present and not placed:
        gguf = sorted(file.name for file in path.glob("*.gguf"))
        what = f"GGUF file(s) {_some(gguf)}, not supported" if gguf else "no *.safetensors file"
        return {}, {}, [f"{path}: {what}; expected the official safetensors shards"]
    indexed = sorted(set(placed.values())) if placed else _complete(present)
    problems += _compare_files(path, indexed, present, stale=placed is not None)
    headers: dict[str, st.Header] = {}
    for name in [name for name in indexed if name in present]:
        try:
            headers[name] = st.read_header(path / name)
        except (st.FormatError, OSError) as error:
            problems.append(str(error))
    tensors: dict[str, st.Tensor] = {}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            if name in tensors:
                first = tensors[name].file.name
                problems.append(
                    f"{path}: tensor {name!r} is in both {first} and {header.file.name}"
                )
            tensors[name] = tensor
    if placed:
        problems += _compare_index(path, placed, headers)
        found = sum(tensor.nbytes for tensor in tensors.values())
        if not problems and total is not None and total != found:
            problems.append(
                f"{path / INDEX}: metadata.total_size is {total}, the shards hold {found} bytes; "
                "the index is stale"
            )
    return headers, tensors, problems


def _read_index(file: Path) -> tuple[dict[str, str], int | None] | None:
    """(tensor -> shard, total_size or None); None where the folder has no index."""
    if not file.is_file():
        return None
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{file}: no weight_map; expected tensor name -> shard file")
    bad = [name for name in placed.values() if not isinstance(name, str) or "/" in name]
    if bad:
        raise ValueError(f"{file}: {bad[0]!r} is not the name of a shard in this folder")
    total = (index.get("metadata") or {}).get("total_size")
    return placed, None if total is None else int(total)


def _complete(present: list[str]) -> list[str]:
    """Without an index: the files there, and those that `-of-` in their names asks for."""
    names = set(present)
    for match in filter(None, map(_SHARD_OF.match, present)):
        for number in range(1, int(match["count"]) + 1):
            names.add(f"{match['stem']}-{number:05d}-of-{match['count']}.safetensors")
    return sorted(names)


def _compare_files(path: Path, indexed: list[str], present: list[str], stale: bool) -> list[str]:
    missing = sorted(set(indexed) - set(present))
    extra = sorted(set(present) - set(indexed))
    if missing and extra and stale:
        return [
            f"{path / INDEX}: the index is stale: it names {_some(missing)}, which the folder "
            f"lacks, and does not name {_some(extra)}, which it has"
        ]
    if missing:
        return [f"{path}: {len(missing)} missing shard(s): {_some(missing)}"]
    return []  # files beside a complete index are no part of the checkpoint


def _compare_index(path: Path, placed: dict[str, str], headers: dict[str, st.Header]) -> list[str]:
    lacking: dict[str, list[str]] = collections.defaultdict(list)
    for name, shard in placed.items():
        if shard in headers and name not in headers[shard].tensors:
            lacking[shard].append(name)
    problems = [
        f"{path / shard}: the shard is there but does not declare {len(names)} tensor(s) that the "
        f"index places in it: {_some(names)}"
        for shard, names in sorted(lacking.items())
    ]
    for shard, header in sorted(headers.items()):
        unplaced = [name for name in header.tensors if placed.get(name) != shard]
        if unplaced:
            problems.append(
                f"{path / INDEX}: the index does not place {len(unplaced)} tensor(s) that {shard} "
                f"declares: {_some(unplaced)}"
            )
    return problems


def _some(names: Iterable[str], limit: int = 6) -> str:
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
