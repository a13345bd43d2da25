"""How a rank's decode step is launched on a GPU that is not there: graphs, loops, kernels by stage.

    python tests/bench/launches.py [--device h200] [--ranks 64] [--requests 256] [--rows 6]

Compiles the step of `bench slice decode` for that chip (needs the `aot` extra; about five minutes)
and prints a line of JSON. launches: what the host starts, in order, one CUDA graph each
"kCommandBuffer"; kernels: operations of the program outside its branches, by stage, a layer's
divided by the layers; seconds: to lower and to compile. Nothing runs. By hand, not in CI.
"""

import argparse
import collections
import dataclasses
import json
import os
import re
import tempfile
import time
from pathlib import Path

DUMP = tempfile.TemporaryDirectory()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_dump_to={DUMP.name}"  # read when jax starts

import jax  # noqa: E402

from deepinfer_jax import shipped  # noqa: E402
from deepinfer_jax.bench import slices  # noqa: E402
from deepinfer_jax.bench.counts import Rows  # noqa: E402
from deepinfer_jax.config import ModelConfig, Numerics  # noqa: E402
from deepinfer_jax.lab import aot, devices  # noqa: E402
from deepinfer_jax.model.compile import COMPILER_OPTIONS, CUDA_OPTIONS  # noqa: E402
from deepinfer_jax.spec import Param  # noqa: E402

OPERATION = re.compile(r" (?:fusion|custom-call|copy|sort|while|conditional|scatter)\(")


def stage(line: str) -> str:
    """The two outermost names of what an operation was traced in; of a layer, those inside it."""
    name = re.search(r'op_name="([^"]*)"', line)
    parts = [] if name is None else name.group(1).split("/")[1:]  # less the program's own name
    layer = bool(parts) and parts[0].startswith("layer_")
    inside = parts[1:3] if layer else parts[:2]
    return "/".join((["layer"] if layer else []) + inside) or "other"


def main() -> None:
    parser = argparse.ArgumentParser(description="how a decode step is launched")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--context", type=int, default=8192)
    args = parser.parse_args()
    cfg = ModelConfig.from_json(shipped.find("models", "v41-flash"))
    rows = Rows(args.requests, args.rows, args.context - args.rows)
    step = slices.rank(cfg, args.ranks, Numerics.preset("reference"), "decode", rows)
    device, _ = devices.parse(args.device)
    targets = aot.devices(device, 1)
    here = jax.sharding.SingleDeviceSharding(targets[0])
    given = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        (step.weights, step.carry, step.given),
        is_leaf=lambda leaf: isinstance(leaf, Param),
    )
    begin = time.perf_counter()
    with aot.context(device, targets):
        lowered = jax.jit(step.turn, donate_argnums=1).lower(*given)
        between = time.perf_counter()
        compiled = lowered.compile(compiler_options=COMPILER_OPTIONS | CUDA_OPTIONS)
    end = time.perf_counter()
    (sequence,) = Path(DUMP.name).glob("*.thunk_sequence_after_thunk_passes.txt")
    launches = re.findall(r"^\d+: (k\w+)", sequence.read_text(), re.MULTILINE)
    entry = str(compiled.as_text()).split("\nENTRY ", 1)[1]
    found = collections.Counter(stage(at) for at in entry.splitlines() if OPERATION.search(at))
    kernels = {
        name: round(count / cfg.num_hidden_layers, 2) if name.startswith("layer/") else count
        for name, count in found.most_common()
    }
    seconds = [round(between - begin, 1), round(end - between, 1)]
    record = {"device": args.device, "rows": dataclasses.asdict(rows), "launches": launches}
    print(json.dumps(record | {"seconds": seconds, "all": found.total(), "kernels": kernels}))


if __name__ == "__main__":
    main()
