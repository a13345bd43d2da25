"""Two processes with four CPU devices each run one program: each reads its shards, one writes."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

import deepinfer_jax as dj
from converters import synthetic
from deepinfer_jax.runtime import cluster
from deepinfer_jax.runtime.engine import Shapes
from tests.lab import small_model

ROOT = pathlib.Path(__file__).parents[2]
# Two window layers: enough for experts over the processes, and quick to compile.
CONFIG = {
    "num_hidden_layers": 2,
    "compress_ratios": [0, 0, 0],
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "candidate_source_layer_id": None,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "dspark_target_layer_ids": [0, 1],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return synthetic.write(tmp_path_factory.mktemp("processes") / "model", small_model.hf(**CONFIG))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def requests():
    rng = np.random.default_rng(1)
    return [rng.integers(3, 500, n).tolist() for n in (7, 20, 3, 31, 12)]


def run(folder, tmp_path, request) -> list[dict[str, list]]:
    """Serves the requests with two processes; what each of them read."""
    lines = [
        json.dumps({"id": number, "prompt_token_ids": prompt, "max_tokens": 6, "temperature": 0})
        for number, prompt in enumerate(requests())
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    port, processes = free_port(), []
    cache = str(request.config.cache.mkdir("jax"))
    for number in range(2):
        arguments = [
            *("generate", "--model", str(folder), "--platform", "cpu", "--numerics", "float32"),
            *("--layout", "ep", "--axis", "expert=8", "--max-slots", "8", "--max-context", "64"),
            *("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")),
            *("--coordinator", f"localhost:{port}", "--num-processes", "2", "--ignore-eos"),
            *("--process-id", str(number), "--cache", str(tmp_path / "cache")),
        ]
        command = [sys.executable, "-m", "tests.lab.process", str(tmp_path / f"read{number}")]
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
        processes.append(
            subprocess.Popen(
                [*command, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        )
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    assert "5/5 requests" in said[0] and "requests" not in said[1], "one of them reports"
    return [json.loads((tmp_path / f"read{number}").read_text()) for number in range(2)]


@pytest.mark.slow
def test_two_processes(folder, tmp_path, request):
    """Tokens of one device; each expert is read by one process only, each once."""
    read = run(folder, tmp_path, request)
    for stack in ("layers/0/ffn/w13/values", "layers/1/ffn/w2/scales"):
        experts = [[bounds[0] for bounds in one[stack]] for one in read]
        assert experts[0] == [[8 * i, 8 * i + 8] for i in range(4)]
        assert experts[1] == [[8 * i, 8 * i + 8] for i in range(4, 8)]
    assert read[0]["embed"] == read[1]["embed"] == [[[0, 512], [0, 128]]], "whole in both"
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(line["id"] for line in lines) == list(range(5))
    found = {line["id"]: line["outputs"][0]["token_ids"] for line in lines}
    llm = dj.LLM(
        folder,
        numerics="float32",
        max_slots=8,
        max_context=64,
        shapes=Shapes(prefill=((8, 32),)),
    )
    greedy = dj.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for number, out in enumerate(llm.generate(requests(), greedy, strict=True)):
        assert out.outputs[0].token_ids == found[number], number


def test_options_that_do_not_fit():
    parse = cluster.Processes.parse
    assert parse(None, None, None) == cluster.Processes()
    with pytest.raises(ValueError, match="--coordinator, --num-processes and --process-id go"):
        parse("localhost:1", None, 0)
    with pytest.raises(ValueError, match="--process-id 2: expected 0..1"):
        parse("localhost:1", 2, 2)
    from deepinfer_jax.layout import Layout
    from deepinfer_jax.runtime.platform import Request

    two = parse("localhost:1", 2, 0)
    with pytest.raises(ValueError, match="give --layout too"):
        cluster.start(Request(), None, two)
    with pytest.raises(ValueError, match="3 devices do not divide over 2 processes"):
        cluster.start(Request(), Layout("odd", (("data", 3),)), two)
