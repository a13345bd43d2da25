"""Devices: the probe on the CPU, plugins that cannot work, and what the doctor says.

A plugin that fails leaves jax on a platform it cannot start, so those cases run in processes of
their own: `doctor` starts one for every report.
"""

import dataclasses
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax import cli
from deepinfer_jax.layout import Layout
from deepinfer_jax.model import compile
from deepinfer_jax.runtime import doctor, platform, probes
from deepinfer_jax.runtime.platform import Finding, PlatformError, Request

ROOT = Path(__file__).resolve().parents[2]

# A library that exports GetPjrtApi and says that its interface has another major version.
OTHER_VERSION = """
#include <stddef.h>
struct Version { size_t size; void* extension; int major, minor; };
struct Api { size_t size; void* extension; struct Version version; void* calls[200]; };
static void* nothing(void* arguments) { return 0; }
static struct Api api;
struct Api* GetPjrtApi(void) {
  api.size = sizeof(api);
  api.version.size = sizeof(api.version);
  api.version.major = 99;
  for (int i = 0; i < 200; i++) api.calls[i] = (void*)nothing;
  return &api;
}
"""
ENDS_PROCESS = "#include <stdlib.h>\nvoid* GetPjrtApi(void) { abort(); }\n"


def test_the_cpu_has_what_the_programs_need() -> None:
    names = []
    selected = platform.select(Request())
    findings = platform.probe(selected.devices, names.append)
    assert [one.name for one in findings] == names
    assert not [one for one in findings if one.lacking]
    works = {one.name: one.works for one in findings}
    assert works["collectives"] and works["donation"] and works["float4_e2m1fn"]
    assert not works["ragged_all_to_all"]
    assert all(one.works or one.instead for one in findings)
    platform.require(selected, findings)
    assert selected.name == selected.reported == "cpu"
    assert len(selected.devices) == 8


def test_a_device_that_lacks_a_type_is_refused_with_a_page() -> None:
    selected = platform.select(Request())
    findings = (
        Finding("bfloat16", True, True, "fine", ""),
        Finding("float8_e4m3fn", True, False, "no such type", "not built"),
        Finding("donation", False, False, "kept", "twice the memory"),
    )
    with pytest.raises(PlatformError) as refused:
        platform.require(selected, findings)
    page = str(refused.value)
    for part in ("float8_e4m3fn: no such type", "not built", "fix:", "JAX_PLATFORMS=cpu"):
        assert part in page
    assert "donation" not in page and "bfloat16" not in page


def test_wrong_answers_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that answers wrongly is as useless as one that raises."""
    monkeypatch.setattr(jax.lax, "top_k", lambda x, k: (x[..., :k], np.zeros((2, k), np.int32)))
    found = {one.name: one for one in platform.probe(jax.devices())}
    assert found["sort, top_k"].lacking and "ties of top_k" in found["sort, top_k"].detail
    assert found["bfloat16"].works


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """jax's CPU under a name that nobody knows; the checks that ran."""
    here = platform.select(Request())
    named = dataclasses.replace(here, name="ascend", route="a plugin")
    monkeypatch.setattr(platform, "select", lambda request: named)
    platform._probed.cache_clear()
    ran: list[str] = []

    def watched(check: probes.Check) -> probes.Check:
        def run(devices: Sequence[Any]) -> str:
            ran.append(check.name)
            return check.run(devices)

        return dataclasses.replace(check, run=run)

    monkeypatch.setattr(probes, "CHECKS", tuple(map(watched, probes.CHECKS)))
    yield ran
    platform._probed.cache_clear()


def test_load_probes_an_untested_device_once(untested: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="nowhere"):
            dj.load("nowhere")
    assert untested == [check.name for check in probes.CHECKS]


@pytest.mark.parametrize("kernels", ["xla", "hopper_fp8", {"index_topk": "blackwell"}, "{broken"])
def test_load_refuses_kernels_before_it_looks_for_weights(
    untested: list[str], kernels: str | dict[str, str]
) -> None:
    with pytest.raises(ValueError, match="^kernels[.:]"):
        dj.load("nowhere", kernels=kernels)
    assert not untested


def test_llm_refuses_a_device_before_it_looks_for_weights(
    untested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(devices: Sequence[Any]) -> str:
        raise NotImplementedError("no e4m3")

    checks = (probes.Check("float8_e4m3fn", broken), *probes.CHECKS[-1:])
    monkeypatch.setattr(probes, "CHECKS", checks)
    with pytest.raises(PlatformError, match=r"'ascend'.*\n.*float8_e4m3fn.*no e4m3"):
        dj.LLM("nowhere")


def test_a_tested_device_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "CHECKS", ())
    assert platform.prepared(None) is None
    one = Layout.single()
    assert platform.prepared(one) is one


def test_a_collective_that_is_missing_is_replaced_with_a_warning() -> None:
    axes, rules = (("expert", 8),), (("expert", ("expert",)),)
    ragged = Layout(name="wide", axes=axes, rules=rules, moe_dispatch="ragged")
    with pytest.warns(UserWarning, match=r"'wide'.*becomes 'alltoall'.*no ragged_all_to_all"):
        found = platform.prepared(ragged)
    assert found == dataclasses.replace(ragged, moe_dispatch="alltoall")
    rounds = dataclasses.replace(ragged, moe_dispatch="alltoall")
    assert platform.prepared(rounds) is rounds


def test_a_layout_that_needs_what_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(devices: Sequence[Any]) -> str:
        raise NotImplementedError("only device memory")

    monkeypatch.setattr(probes, "CHECKS", (probes.Check("pinned_host", broken, False, "no host"),))
    platform._probed.cache_clear()
    with pytest.raises(PlatformError, match=r"pinned_host: .*only device memory\n.*no host"):
        platform.prepared(Layout(engram="host"))
    platform._probed.cache_clear()


def test_a_plugin_gets_the_compiler_options_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a backend is called, it may be XLA's CPU; one that is not may know no option."""
    assert compile.compiler_options() == compile.COMPILER_OPTIONS | compile.CPU_OPTIONS
    here = jax.devices()[0].client
    monkeypatch.setattr(compile.backend, "backends", lambda: {"ascend": here})
    monkeypatch.setattr(compile, "CPU_OPTIONS", {"xla_cpu_of_another_compiler": ""})
    assert compile.compiler_options() == compile.COMPILER_OPTIONS
    found = {one.name: one for one in platform.probe(jax.devices(), names={"compiler options"})}
    assert "xla_cpu_of_another_compiler" in found["compiler options"].detail
    assert not found["compiler options"].works and not found["compiler options"].lacking
    monkeypatch.setattr(compile.backend, "backends", lambda: {"tpu": here})
    assert compile.compiler_options() == compile.COMPILER_OPTIONS
    monkeypatch.setattr(compile.backend, "backends", lambda: {"cuda": here})
    assert compile.compiler_options() == compile.COMPILER_OPTIONS | compile.CUDA_OPTIONS
    monkeypatch.setattr(compile, "CUDA_OPTIONS", {"xla_gpu_of_another_compiler": ""})
    assert compile.compiler_options() == compile.COMPILER_OPTIONS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "a.so", ()), "--platform"),
        (("cpu", "a.so", ()), "jax's own"),
        (("npu", None, ("a=1",)), "--pjrt-plugin"),
        (("npu", "a.so", ("a",)), "NAME=VALUE"),
        (("npu,cpu", None, ()), "one name"),
    ],
)
def test_options_that_contradict_are_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request.parse(*arguments)


def test_options_have_types() -> None:
    given = ("a=1", "b=true", "c=0.5", "d=1,2", "e=x:y", "f=")
    wanted = (("a", 1), ("b", True), ("c", 0.5), ("d", [1, 2]), ("e", "x:y"), ("f", ""))
    assert Request.parse("npu", "a.so", given).options == wanted


def test_a_started_jax_does_not_change_platform() -> None:
    assert platform.select(Request("cpu")).route == "already started"
    with pytest.raises(PlatformError, match="already started on 'cpu'"):
        platform.select(Request("npu"))


@pytest.mark.parametrize("case", ["missing", "text", "other", "version", "crash", "name"])
def test_a_plugin_that_cannot_work_is_a_page_with_the_fix(case: str, tmp_path: Path) -> None:
    library = tmp_path / "plugin.so"
    parts = {
        "missing": ("no such file", "give the path"),
        "text": ("Failed to open", "`ldd PATH`"),
        "other": ("GetPjrtApi not found", "no PJRT plugin"),
        "version": ("Mismatched PJRT", f"made for jax {jax.__version__}"),
        "crash": ("ended the process", "another release"),
        "name": ("not in the list of known", "--pjrt-plugin PATH"),
    }[case]
    if case == "text":
        library.write_text("not a library")
    elif case == "other":
        shutil.copy(np._core._multiarray_umath.__file__, library)
    elif case in ("version", "crash"):
        _compile({"version": OTHER_VERSION, "crash": ENDS_PROCESS}[case], library)
    plugin = None if case == "name" else str(library)
    report = doctor.examine(Request("npu", plugin), patience_s=120.0)
    assert not report.works and not report.device
    text = report.text()
    for part in (*parts, "cpu"):
        assert part in text
    if case != "crash":
        assert "JAX_PLATFORMS=cpu" in text and jax.__version__ in text


def _compile(source: str, library: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    code = library.with_suffix(".c")
    code.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, code], check=True)


def test_doctor_reports_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--platform", "cpu"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "float8_e8m0fnu",
        "index_topk.select: reference",
        "needs platform gpu",
        jax.__version__,
    ):
        assert part in shown
    assert shown.rstrip().endswith("works")


def test_doctor_knows_the_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = dict(_split(text) for text in project["dependencies"])
    assert set(bounds) == set(doctor.NEEDED)
    low, high = doctor.JAX_RANGE
    assert bounds["jax"] == f">={low},<{high}"
    extras = project["optional-dependencies"]
    for package, (extra, _) in doctor.OPTIONAL.items():
        assert package in [_split(text)[0] for text in extras[extra]]


def _split(requirement: str) -> tuple[str, str]:
    name, _, bound = requirement.partition(">=")
    return name, ">=" + bound
