"""Every GPU kernel at every released shape, compiled for H200 and B200 without a GPU: tensor-core
instructions are there, nothing spills, registers stay within the case's bound."""

import importlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from pallas_kernels import OPERATIONS
from pallas_kernels.cases import tagged
from tests.pallas import aot

pytestmark = [pytest.mark.aot, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=["H200", "B200"])
def compiled(request, tmp_path_factory):
    """The lines of one chip; an operation is compiled in a process of its own."""
    reason = aot.missing()
    if reason is not None:
        pytest.skip(reason)

    def lines(op):
        folder = tmp_path_factory.mktemp(f"{request.param}_{op}")
        command = [sys.executable, aot.__file__, request.param, str(folder), op]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [line for found in pool.map(lines, OPERATIONS) for line in found]


def case_of(line):
    shapes = importlib.import_module(f"pallas_kernels.{line['op']}.shapes")
    return next(c for c in tagged(shapes.CASES, "aot") if c.name == line["case"])


def test_something_was_compiled(compiled):
    assert {line["op"] for line in compiled if "kernels" in line} >= {"grouped_gemm", "row_matmul"}


def test_no_spills_and_few_registers(compiled):
    bad = [
        f"{line['op']}.{line['case']} {line['implementation']}: {kernel}"
        for line in compiled
        for kernel in line.get("kernels", [])
        if kernel["spilled"] or kernel["registers"] > case_of(line).registers
    ]
    assert not bad, "\n".join(bad)


def test_products_in_flight_are_not_serialised(compiled):
    bad = [line["case"] for line in compiled for k in line.get("kernels", []) if k["serialised"]]
    assert not bad


def test_tensor_core_instructions(compiled):
    bad = []
    for line in compiled:
        if "kernels" not in line:
            continue
        wanted = dict(case_of(line).instructions).get(line["implementation"].split("_")[0], "")
        names = {name for kernel in line["kernels"] for name in kernel["opcodes"]}
        if wanted and not any(re.fullmatch(wanted, name) for name in names):
            bad.append(f"{line['op']}.{line['case']} {line['implementation']}: no {wanted}")
    assert not bad, "\n".join(bad)


def test_rows_are_quantised_sixteen_bytes_at_a_time(compiled):
    rows = [x for x in compiled if x["op"] == "quantise" and x["case"].startswith("rows_")]
    found = [kernel["opcodes"] for x in rows for kernel in x.get("kernels", [])]
    per_thread = {(code["LDG"], code["STG"]) for code in found}  # of 64 bytes
    assert per_thread == {(4, 4)}


def test_swiglu_loads_sixteen_bytes_at_a_time(compiled):
    """Of both products: 8 channels a thread, in bf16 or as two pieces of float32 a part."""
    lines = [x for x in compiled if x["case"].startswith("swiglu_") and "kernels" in x]
    assert lines
    for line in lines:
        parts, dtype = case_of(line).abstract()[0].shape[0], case_of(line).abstract()[0].dtype
        wanted = 2 * parts * (dtype.itemsize // 2)
        assert [(k["opcodes"]["LDG"], k["opcodes"]["STG"]) for k in line["kernels"]] == [
            (wanted, 1)
        ]


def test_streams_are_updated_sixteen_bytes_at_a_time(compiled):
    """Loads: the output, or its parts as two pieces of float32 each, and four streams of the first
    chunk and of the next ones, 24 mixes. Stores: four streams and what they collapse to, of the
    last chunk and of those before, the mean square."""
    lines = [x for x in compiled if x["case"].startswith("update_") and "kernels" in x]
    assert lines
    for line in lines:
        parts = case_of(line).abstract()[0]
        chunk = parts.shape[0] * (parts.dtype.itemsize // 2) + 4
        for kernel in line["kernels"]:
            found = kernel["opcodes"]
            assert found["LDG"] <= 2 * chunk + 6 and found["STG"] == 2 * 5 + 1, line["case"]


def test_declined_cases_say_why(compiled):
    for line in compiled:
        assert ("kernels" in line) != bool(line.get("declined"))
