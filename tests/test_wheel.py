"""The wheel holds the three packages and the configs, works from another folder, and its
lower bounds are the ones that are tested. The network is not used: .ci/run installs it for real.
"""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from this checkout."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    return path


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    packages = {"deepinfer_jax", "pallas_kernels", "converters"}
    assert packages <= tops
    assert all(top in packages or top.endswith(".dist-info") for top in tops), tops
    assert "deepinfer_jax/configs/models/v41-flash.json" in names
    shipped = [path for path in (ROOT / "configs").rglob("*") if path.is_file()]
    for path in shipped:
        assert f"deepinfer_jax/{path.relative_to(ROOT).as_posix()}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_works_from_another_folder(wheel, tmp_path):
    """Unpacked elsewhere and first on the path: the packages and the shipped configs are found."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import converters, deepinfer_jax, pallas_kernels\n"
        "from deepinfer_jax import shipped\n"
        "for package in (converters, deepinfer_jax, pallas_kernels):\n"
        f"    assert package.__file__.startswith({str(tmp_path)!r}), package.__file__\n"
        f"assert str(shipped.configs()).startswith({str(tmp_path)!r})\n"
        "print(deepinfer_jax.ModelConfig.from_json(shipped.find('models', 'v41-flash')))"
    )
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ModelConfig(" in done.stdout


def test_lower_bounds_are_the_tested_ones():
    """Each dependency of ours is pinned at its lower bound in .ci/oldest.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(
        re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in project["dependencies"]
    )
    lines = (ROOT / ".ci" / "oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)

    def release(version: str) -> list[str]:
        return re.sub(r"(\.0)+$", "", version).split(".")

    assert {name: release(v) for name, v in bounds.items()} == {
        name: release(pins.get(name, "0")) for name in bounds
    }
