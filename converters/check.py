"""What is wrong with a checkpoint folder, from headers alone: `python -m converters.check SRC`.

`examine` is what every reader of a checkpoint starts with: open the folder, tell its dialect, and
compare what is there with what the config declares. All findings are one line each and come
together, before any weight is read and before anything is written. `--deep` goes on to the values:
NaN codes, scale exponents outside the plausible range, non-finite floats; of a converted folder,
the sha256 of every tensor against the manifest.
"""

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from converters import census, converted, dialects, names, recipes
from converters import safetensors_io as st
from converters.progress import reported
from converters.source import CheckpointError, Source, open_source, resolve
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import engram_hash
from deepinfer_jax.spec import MX_GROUP

SLICE_BYTES = 2**24
LOW_EXPONENT, HIGH_EXPONENT = 127 - 60, 127 + 20  # trained scales lie well inside


@dataclasses.dataclass(frozen=True)
class Checked:
    """A checkpoint whose every tensor is accounted for: a recipe for each declared tensor.

    cfg, config: the source's, with storage as the tensors have it. stored: the source tensors by
    official name.
    """

    source: Source
    cfg: ModelConfig
    config: dict[str, Any]
    stored: Mapping[str, dialects.Stored]
    table: names.Table
    recipes: Mapping[str, recipes.Recipe]


def examine(path: str | Path) -> Checked:
    """Open and compare; raises `CheckpointError` with every finding, one line each."""
    source = open_source(path)
    cfg, config = source.cfg, source.config
    table = names.table(cfg)
    stored, problems = dialects.canonical(source.tensors, table.by_name)
    native = table
    if cfg.dense_dtype != "fp8":
        block = (MX_GROUP, MX_GROUP)  # what the config says, without FP8, counts for nothing
        native = names.table(dataclasses.replace(cfg, dense_dtype="fp8", weight_block_size=block))
    needed = dialects.storage(native, stored)
    if needed != {"dense_dtype": cfg.dense_dtype, "expert_dtype": cfg.expert_dtype}:
        config = with_storage(config, cfg, needed)
        try:
            cfg = ModelConfig.from_hf(config)
        except ValueError as error:
            raise CheckpointError([f"{source.path / 'config.json'}: {error}"]) from error
        table = names.table(cfg)
    found, seen, more = recipes.build(cfg, table, stored)
    problems += [*more, *census.compare(cfg, table, seen)]
    try:
        engram_hash.hash_constants(cfg)
    except ValueError as error:
        problems.append(f"config.json: {error}")
    if problems:
        raise CheckpointError(f"{source.path}: {problem}" for problem in problems)
    return Checked(source, cfg, config, stored, table, found)


def rounded(used: Mapping[str, recipes.Recipe]) -> str | None:
    """A warning, if tensors are stored wider than the tree keeps them; None if nothing is lost."""
    names = [name for name, recipe in used.items() if recipes.rounds(recipe)]
    if not names:
        return None
    return (
        f"{len(names)} tensor(s) stored as F32 or F16 are rounded to bfloat16, as the release has "
        f"them: {', '.join(census.fold(names))}"
    )


def with_storage(
    config: Mapping[str, Any], cfg: ModelConfig, needed: Mapping[str, str]
) -> dict[str, Any]:
    """config.json with the section that says how matrices are kept made true."""
    changed = {key: value for key, value in config.items() if key != "quantization_config"}
    if set(needed.values()) != {"bf16"}:
        section = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(cfg.weight_block_size),
            "scale_fmt": "ue8m0",
        }
        changed["quantization_config"] = section | config.get("quantization_config", {}) | needed
    return changed


def deep(checked: Checked) -> Iterator[str]:
    """Findings in the values; reads everything, in slices."""
    with st.Reader() as reader:
        for name, entry in checked.table.by_name.items():
            counts = {"NaN": 0, "infinite": 0, "exponent out of range": 0}
            param = checked.table.params[entry.leaf]
            rows, item = entry.shape[0], np.dtype(param.dtype).itemsize
            row_bytes = int(np.prod(entry.shape[1:], dtype=np.int64)) * item
            for begin, end in st.row_slices(rows, row_bytes, SLICE_BYTES):
                out = np.empty((end - begin, *entry.shape[1:]), param.dtype)
                checked.recipes[name].fill(reader, begin, end, out)
                for what, count in suspicious(out).items():
                    counts[what] += count
            for what, count in counts.items():
                if count:
                    yield f"{checked.source.path}: {name}: {count} value(s) {what}"


def verify(opened: converted.Converted) -> Iterator[str]:
    """Tensors of a converted folder whose bytes are not those that were converted."""
    for name, entry in opened.table.by_name.items():
        hasher = hashlib.sha256()
        try:
            for rows in opened.slices(entry, SLICE_BYTES):
                hasher.update(recipes.raw(rows))
        except CheckpointError as error:
            yield from error.problems
            continue
        if hasher.hexdigest() != opened.manifest["tensors"][name]:
            yield f"{opened.path}: {name}: its bytes are not those that were converted"


def suspicious(data: np.ndarray) -> dict[str, int]:
    """How many stored values mean nothing a checkpoint should hold, by kind."""
    if data.dtype == np.uint8:
        return {}  # each of the 256 pairs of e2m1 codes is a pair of numbers
    if data.dtype.name == "float8_e8m0fnu":
        code = data.view(np.uint8)
        outside = (code < LOW_EXPONENT) | (code > HIGH_EXPONENT)
        return {
            "NaN": int((code == 255).sum()),
            "exponent out of range": int((outside & (code != 255) & (code != 0)).sum()),
        }
    if data.dtype.name == "float8_e4m3fn":
        return {"NaN": int(((data.view(np.uint8) & 0x7F) == 0x7F).sum())}
    wide = data.astype(np.float32)
    return {"NaN": int(np.isnan(wide).sum()), "infinite": int(np.isinf(wide).sum())}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0: nothing found, 2: findings (one line each on stderr), 130: interrupted
    (`reported`)."""
    parser = argparse.ArgumentParser(prog="python -m converters.check", description=__doc__)
    parser.add_argument("source", help="checkpoint folder, or a Hugging Face Hub id")
    parser.add_argument("--revision", help="of a Hub id")
    parser.add_argument("--deep", action="store_true", help="also read and check all values")
    options = parser.parse_args(arguments)
    return reported(lambda: _checked(resolve(options.source, options.revision), options.deep))


def _checked(path: Path, is_deep: bool) -> str:
    """What to say of a folder without fault; raises `CheckpointError` with every finding."""
    converted.refuse_unfinished(path)
    if converted.is_converted(path):
        opened = converted.open_converted(path)
        table, found = opened.table, list(verify(opened)) if is_deep else []
    else:
        checked = examine(path)
        table, found = checked.table, list(deep(checked)) if is_deep else []
        if warning := rounded(checked.recipes):
            print(f"warning: {warning}", file=sys.stderr)
    if found:
        raise CheckpointError(found)
    return f"{path}: {len(table.by_name):,} tensors, {table.nbytes:,} bytes, all accounted for"


if __name__ == "__main__":
    sys.exit(main())
