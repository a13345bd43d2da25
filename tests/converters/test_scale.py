"""The size of the real thing: the release's headers in full, and tables far beyond the budget."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from converters import check, synthetic

ROOT = Path(__file__).resolve().parents[2]


RELEASED = """
import json, sys
from converters import check, synthetic
from deepinfer_jax import shipped

config = json.loads(shipped.find("models", "v41-flash").read_text())
folder = synthetic.write(sys.argv[1], config, shards=48, sparse=True)
assert sum(file.stat().st_blocks for file in folder.iterdir()) * 512 < 200e6
checked = check.examine(folder)
assert checked.source.cfg.engram_num_embeddings == (384_006_168, 384_016_682)
print(len(checked.source.tensors), checked.source.nbytes)
"""


def run(code: str, *arguments: object, **env: str) -> str:
    """Run code in a fresh interpreter (without the tests' run-time type checks)."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_released_size_from_headers_alone(tmp_path):
    """A sparse checkpoint of the released config: 510 GB in 48 files, none of it on the disk."""
    assert run(RELEASED, tmp_path / "m") == "96085 510286023000\n"


THERE_AND_BACK = """
import sys
from converters import check, from_hf, to_hf

source, out, back = sys.argv[1:]
assert from_hf.main([source, out, "--quiet"]) == 0
assert to_hf.main([out, back, "--quiet"]) == 0
assert check.main([back, "--deep"]) == 0
assert not [name for name in sys.modules if name.startswith("jax.experimental.pallas")]
kernels = [name for name in sys.modules if name.startswith("pallas_kernels.")]
assert not [name for name in kernels if name.endswith(("reference", "xla", "hopper", "blackwell"))]
"""


def test_no_device_and_no_kernel_is_touched(checkpoint, tmp_path):
    """On a platform that does not exist jax raises as soon as anything asks for a device."""
    places = checkpoint, tmp_path / "out", tmp_path / "back"
    run(THERE_AND_BACK, *places, JAX_PLATFORMS="no-such-platform")


MEASURE = """
import sys
from pathlib import Path
from converters import from_hf, to_hf

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

source, target, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])
work = from_hf if sys.argv[4] == "from_hf" else to_hf
from converters.check import examine
from converters.converted import open_converted
(examine if work is from_hf else open_converted)(source)
Path("/proc/self/clear_refs").write_text("5")
before = peak()
work.convert(source, target, memory=budget, quiet=True)
print(peak() - before)
"""


@pytest.mark.slow
def test_peak_memory_with_a_table_of_twenty_budgets(tmp_path):
    """There and back; the largest slice is a block or a few rows, far below the budget."""
    budget = 64 * 2**20
    config = synthetic.draw_config(3)
    text = config["text_config"]
    text |= {"engram_layer_ids": text["engram_layer_ids"][:1], "engram_head_dim": 256}
    text["engram_num_embeddings"] = [0]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    text["engram_vocab_size"] = -(-20 * budget // 256 // columns)
    source = synthetic.write(tmp_path / "source", config, sparse=True)
    table = check.examine(source).table
    assert max(param.nbytes for param in table.params.values()) >= 20 * budget
    for work, origin, result in (("from_hf", "source", "out"), ("to_hf", "out", "back")):
        over = int(run(MEASURE, tmp_path / origin, tmp_path / result, budget, work))
        print(f"{work}: {over / 2**20:.0f} MiB over the start, budget {budget / 2**20:.0f}")
        assert over < budget
