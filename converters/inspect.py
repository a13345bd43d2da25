"""What a model folder holds, without reading a weight: `python -m converters.inspect DIR`.

`inspect` describes an official or converted folder, or an unfinished conversion: where it comes
from, tensors and bytes by part and by dtype, the tree with equal leaves of different layers folded
together, and what each device of a layout has to hold; `plain` for programs, `text` for people.
"""

import argparse
import collections
import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from converters import converted, names
from converters.census import ranges
from converters.check import examine
from converters.progress import reported
from converters.source import resolve
from converters.target import JOURNAL
from deepinfer_jax import spec
from deepinfer_jax.layout import Layout
from deepinfer_jax.model import parallel

# Part of the model -> pattern of its leaves; the first that matches counts.
PARTS = {
    "drafter": r"draft/",
    "vision": r"vision/|image_",
    "embedding and head": r"(embed|head|norm)$",
    "Engram": r"layers/\d+/engram/",
    "routed experts": r"layers/\d+/ffn/(w13|w2)/?",
    "shared experts": r"layers/\d+/ffn/shared",
    "routers": r"layers/\d+/ffn/(gate|bias)",
    "compressors and indexers": r"layers/\d+/attn/(compressor|indexer)/",
    "attention": r"layers/\d+/(attn/|attn_norm|ffn_norm)",
    "hyper-connections": r"layers/\d+/hc_",
}


@dataclasses.dataclass(frozen=True)
class Description:
    """`values` is JSON-able; its keys are those that `text` prints."""

    values: Mapping[str, Any]

    def plain(self) -> dict[str, Any]:
        """The description as one JSON-able dictionary."""
        return dict(self.values)

    def text(self, depth: int = 3) -> str:
        """The description for people; the tree down to `depth` levels."""
        return "\n".join(_lines(self.values, depth))


def inspect(path: str | Path, layout: Layout | None = None) -> Description:
    """Describe a model folder or Hub id; raises `CheckpointError` for a broken one.

    layout: adds `per_device`, the bytes of weights that each of its devices holds.
    """
    path = resolve(path)
    journal = path / JOURNAL
    if path.name.endswith(converted.PARTIAL) and journal.is_file():
        done = len(journal.read_text(encoding="utf-8").splitlines()) - 1
        return Description({"path": str(path), "kind": "unfinished conversion", "pieces": done})
    if converted.is_converted(path):
        opened = converted.open_converted(path)
        cfg, table = opened.cfg, opened.table
        origin = {key: opened.manifest[key] for key in ("source", "options", "format_version")}
        kind = "converted"
    else:
        checked = examine(path)
        cfg, table = checked.cfg, checked.table
        origin, kind = {"source": checked.source.identity()}, "official"
    found: dict[str, Any] = {
        "path": str(path),
        "kind": kind,
        "layers": sorted({int(leaf.split("/")[1]) for leaf in table.params if _is_layer(leaf)}),
        "num_hidden_layers": cfg.num_hidden_layers,
        "draft_stages": cfg.num_nextn_predict_layers,
        "tensors": len(table.by_name),
        "bytes": table.nbytes,
        "parameters": names.parameters(table.params),
        "parts": _count(table, lambda leaf, _: _part(leaf)),
        "dtypes": _count(table, lambda _, entry: entry.dtype),
        "tree": list(_tree(table)),
        **origin,
    }
    if layout is not None:
        placed = parallel.placed(dict(table.params), layout)
        found["layout"] = layout.name
        found["per_device"] = sum(per_device(layout, leaf, placed[leaf]) for leaf in placed)
    return Description(found)


def per_device(layout: Layout, leaf: str, param: spec.Param) -> int:
    """Bytes of a leaf on each device of a layout; tables kept on the host count as none."""
    if layout.engram == "host" and "engram_rows" in param.axes:
        return 0
    placed = layout.spec(param.axes, param.shape, leaf)
    axes = [axis for part in placed if part for axis in ([part] if isinstance(part, str) else part)]
    return param.nbytes // math.prod(layout.axis_size(axis) for axis in axes)


def _is_layer(leaf: str) -> bool:
    return leaf.startswith("layers/")


def _part(leaf: str) -> str:
    return next((part for part, pattern in PARTS.items() if re.match(pattern, leaf)), "other")


def _count(table: names.Table, key: Any) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for leaf, entries in table.by_leaf.items():
        for entry in entries:
            counts[key(leaf, entry)]["tensors"] += 1
            counts[key(leaf, entry)]["bytes"] += entry.nbytes
    return dict(counts)


def _tree(table: names.Table) -> Iterator[dict[str, Any]]:
    """Leaves of equal name, shape and dtype as one row, with the ranges of their numbers."""
    groups: dict[tuple[str, spec.Param], list[str]] = collections.defaultdict(list)
    for leaf, param in table.params.items():
        groups[re.sub(r"(?<=/)\d+(?=/)", "#", leaf), param].append(leaf)
    for (kind, param), leaves in groups.items():
        numbers = sorted({int(n) for leaf in leaves for n in re.findall(r"(?<=/)\d+(?=/)", leaf)})
        yield {
            "leaf": kind.replace("#", f"{{{ranges(numbers)}}}"),
            "dtype": param.dtype,
            "shape": list(param.shape),
            "axes": list(param.axes),
            "leaves": len(leaves),
            "bytes": param.nbytes * len(leaves),
        }


def _lines(found: Mapping[str, Any], depth: int) -> Iterator[str]:
    yield f"{found['path']}: {found['kind']}"
    if "tensors" not in found:
        yield f"  {found['pieces']} pieces done; run the converter again to finish it"
        return
    source = found["source"]
    yield (
        f"  source    {source['model_type']}, {source['tensors']:,} tensors, "
        f"{source['bytes']:,} bytes, revision {source['revision'] or 'unknown'}"
    )
    if found.get("options"):
        yield f"  options   {json.dumps(found['options'])}"
    yield (
        f"  layers    {ranges(found['layers'])} of {found['num_hidden_layers']}, "
        f"{found['draft_stages']} draft stages"
    )
    yield (
        f"  here      {found['tensors']:,} tensors, {found['bytes']:,} bytes, "
        f"{found['parameters']:,} parameters"
    )
    for title in ("parts", "dtypes"):
        yield f"  {title}"
        for name, count in sorted(found[title].items(), key=lambda item: -item[1]["bytes"]):
            yield f"    {name:26} {count['tensors']:>8,} tensors {count['bytes']:>18,} bytes"
    if "per_device" in found:
        yield f"  layout {found['layout']}: {found['per_device']:,} bytes of weights a device"
    yield "  tree"
    branches: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for row in found["tree"]:
        branches["/".join(row["leaf"].split("/")[:depth])].append(row)
    for branch, rows in branches.items():
        size = sum(row["bytes"] for row in rows)
        one = len(rows) == 1
        what = f"{rows[0]['dtype']}{rows[0]['shape']}" if one else f"{len(rows)} kinds of leaves"
        yield f"    {branch:40} {what:44} {size:>18,} bytes"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0, 2 with one line a finding on stderr, 130: interrupted (`reported`)."""
    parser = argparse.ArgumentParser(prog="python -m converters.inspect", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", help="official or converted folder, or a Hugging Face Hub id")
    parser.add_argument("--layout", type=Path, help="layout file: adds the bytes a device")
    parser.add_argument("--depth", type=int, default=3, help="levels of the tree to print (3)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)

    def described() -> str:
        layout = Layout.from_toml(options.layout) if options.layout else None
        found = inspect(options.folder, layout)
        return json.dumps(found.plain()) if options.json else found.text(options.depth)

    return reported(described)


if __name__ == "__main__":
    sys.exit(main())
