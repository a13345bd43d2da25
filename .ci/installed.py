"""Run by the wheel job outside any checkout, with ``python -I``: is everything in the wheel?"""

import importlib
import pkgutil
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

import deepinfer_jax
from deepinfer_jax import shipped

site = Path(sysconfig.get_paths()["purelib"]).resolve()
for name in ("deepinfer_jax", "pallas_kernels", "converters"):
    package = importlib.import_module(name)
    assert Path(package.__path__[0]).resolve() == site / name, package.__path__
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
for name in deepinfer_jax.__all__:
    getattr(deepinfer_jax, name)

assert shipped.configs() == site / "deepinfer_jax" / "configs"
config = deepinfer_jax.ModelConfig.from_json(shipped.find("models", "v41-flash"))
files = {str(file) for file in distribution("deepinfer-jax").files or ()}
assert any(file.endswith("licenses/LICENSE") for file in files), sorted(files)
assert not any(file.startswith("tests/") for file in files)
print(f"wheel: {len(files)} files, three packages, the configs and the licence are there")
