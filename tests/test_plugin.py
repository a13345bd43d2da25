"""The whole way on a second PJRT plugin: convert, load, generate with speculation and a grammar.

The plugin is XLA's CPU as a separate library (PyPI: lammps-jax-pjrt-cpu), loaded under the name
"npu" by its path. It shares no client, no handlers and no registration with jax's own CPU, so
whatever only works on a built-in platform fails here. Every run has a process of its own.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from converters import synthetic

pytestmark = [pytest.mark.plugin, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, LIBRARY = "lammps_jax_pjrt_cpu", "pjrt_c_api_cpu_plugin.so"
SMALL = 195  # of the seeds of draw_config, one with four layers


@pytest.fixture(scope="module")
def plugin() -> str:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        pytest.fail(f"{PACKAGE} is not installed: pip install lammps-jax-pjrt-cpu==0.11.2")
    return str(Path(found.origin).parent / LIBRARY)


def _run(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_jax.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_tokens_equal_those_of_the_built_in_cpu(plugin: str, tmp_path: Path) -> None:
    source = synthetic.write(tmp_path / "official", synthetic.draw_config(SMALL), seed=SMALL)
    _run("convert", str(source), str(tmp_path / "converted"), "--quiet")
    common = ["generate", "--model", str(tmp_path / "converted"), "--prompt", "hello"]
    common += ["--max-tokens", "12", "--seed", "3", "--temperature", "0.8", "--json"]
    common += ["--max-slots", "2", "--max-context", "64", "--regex", "[a-z]+[0-9]{2,}"]
    here = json.loads(_run(*common, "--platform", "cpu"))
    there = json.loads(_run(*common, "--platform", "npu", "--pjrt-plugin", plugin))
    assert there["outputs"][0]["token_ids"] == here["outputs"][0]["token_ids"]
    assert there["outputs"][0]["text"] == here["outputs"][0]["text"]
    assert there["error"] is None and there["metrics"]["accepted_rows"] > 0


def test_doctor_probes_the_plugin(plugin: str) -> None:
    options = ["--platform", "npu", "--pjrt-plugin", plugin]
    shown = _run("doctor", "--json", *options, "--plugin-option", "cpu_device_count=3")
    report = json.loads(shown)
    assert (report["name"], report["reported"], len(report["devices"])) == ("npu", "cpu", 3)
    works = {one["name"]: one["works"] for one in report["probe"]}
    assert works["collectives"] and works["float8_e4m3fn"] and works["float8_e8m0fnu"]
    (options,) = (one for one in report["probe"] if one["name"] == "compiler options")
    assert options["works"] and "ynn" in options["detail"], "the order of sums of jax's own CPU"


def test_an_option_the_plugin_does_not_know_is_named(plugin: str) -> None:
    options = ["--platform", "npu", "--pjrt-plugin", plugin, "--plugin-option", "turbo=1"]
    page = _run("generate", "--model", "nowhere", "--prompt", "a", *options, code=2)
    assert "turbo" in page and "leave that --plugin-option out" in page
