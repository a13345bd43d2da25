"""Leaves of a converted checkpoint: sharded zarr3 arrays in one orbax checkpoint folder.

`create` describes a leaf, `open_leaf` opens it with tensorstore, which fetches the chunks that a
region touches and no others (grid.py cuts them, shards.py writes them). Nothing is compressed: FP8
and FP4 bits do not shrink, and a byte here is a byte of the source. All shards are written, zeros
too, and reading a missing one is an error, never zeros. The folder also has orbax's tree metadata:
`orbax.checkpoint.StandardCheckpointer().restore` reads it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from converters.grid import Grid, Region
from deepinfer_jax import spec

_SCALAR_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}]


def folder_name(path: str) -> str:
    """Orbax's folder of a leaf: `layers/3/attn/wq_a/values` -> `layers.3.attn.wq_a.values`."""
    return path.replace("/", ".")


def _spec(folder: Path, path: str) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder / folder_name(path)}/"},
        "fill_missing_data_reads": False,
        "recheck_cached_data": False,
    }


def context(threads: int) -> ts.Context:
    """Tensorstore resources for reading: no cache, this many threads."""
    limit = {"limit": threads}
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": limit,
            "file_io_concurrency": limit,
        }
    )


def wait(future: Any) -> Any:
    """Result of a tensorstore future; its failures as one-line `OSError`s."""
    try:
        return future.result()
    except (ValueError, RuntimeError) as error:  # the kinds tensorstore has for a failed operation
        reason = str(error).splitlines()[0]
        raise OSError(re.sub(r" \[\w+='.*", "", reason)) from error


def create(folder: Path, path: str, param: spec.Param, cut: Grid) -> None:
    """Describe a leaf (`zarr.json`), and make the folders of its shards."""
    shard = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": cut.chunk,
            "codecs": _SCALAR_CODECS,
            "index_codecs": [*_SCALAR_CODECS, {"name": "crc32c"}],
        },
    }
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": param.shape,
        "data_type": np.dtype(param.dtype).name,
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": cut.shard}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [shard],
    }
    leaf = folder / folder_name(path)
    for parent in {(leaf / file).parent for file, _ in cut.shards()}:
        parent.mkdir(parents=True, exist_ok=True)
    (leaf / "zarr.json").write_text(json.dumps(metadata), encoding="utf-8")


def open_leaf(folder: Path, path: str, param: spec.Param, threads: ts.Context) -> Any:
    """Open a leaf for reading; `OSError` if it is absent or of another shape or dtype."""
    leaf = wait(ts.open(_spec(folder, path), open=True, read=True, context=threads))
    if leaf.shape != param.shape or leaf.dtype.numpy_dtype != np.dtype(param.dtype):
        raise OSError(
            f"{folder / folder_name(path)}: {leaf.dtype.name}{list(leaf.shape)}; the config "
            f"declares {np.dtype(param.dtype).name}{list(param.shape)}"
        )
    return leaf


def write_metadata(folder: Path, params: Mapping[str, spec.Param]) -> None:
    """Orbax's description of the tree: which leaves there are, and that they are zarr3 arrays."""
    tree = {}
    for path, param in params.items():
        keys = path.split("/")
        tree[str(tuple(keys))] = {
            "key_metadata": [{"key": k, "key_type": 1 if k.isdigit() else 2} for k in keys],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": param.shape,
            },
        }
    described = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (folder / "_METADATA").write_text(json.dumps(described), encoding="utf-8")


def as_region(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """A device's index (slices with open ends, missing axes whole) with its bounds filled in."""
    whole = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(slice(*part.indices(n)) for part, n in zip(whole, shape, strict=True))
