"""Strictness of every test: the settings here turn silent mistakes into failures.

- eight CPU devices, so that layouts over several devices run everywhere;
- strict dtype promotion and no implicit rank promotion: a cast or a broadcast is written down;
- warnings are errors (``filterwarnings`` in pyproject.toml);
- jaxtyping checks each annotated function of our packages with beartype, at trace time.

The platform is the CPU unless the marker expression asks for ``gpu`` or ``plugin``. Compiled
programs are kept in pytest's cache folder (``pytest --cache-clear`` drops them); the size bound
also makes jax take a file lock, so several runs may share the folder.
"""

from pathlib import Path
from typing import Any

import jax
import pytest
from jaxtyping import install_import_hook
from xdist.scheduler import LoadFileScheduling

PACKAGES = ("deepinfer_jax", "pallas_kernels", "converters")
# Linux ends a process with more than 65,530 mappings; one module maps up to some 20,000 and they
# take memory.
MAPPINGS = 30_000

install_import_hook(PACKAGES, "beartype.beartype")


def _selects(expression: str, marker: str) -> bool:
    """Whether a pytest marker expression asks for ``marker``: named, and not only negated."""
    words = expression.replace("(", " ").replace(")", " ").split()
    return any(word == marker and (i == 0 or words[i - 1] != "not") for i, word in enumerate(words))


def pytest_configure(config: pytest.Config) -> None:
    """Set jax up once, before any test module is imported."""
    expression = config.getoption("markexpr")
    if not (_selects(expression, "gpu") or _selects(expression, "plugin")):
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if config.pluginmanager.hasplugin("cacheprovider"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
    jax.config.update("jax_compilation_cache_max_size", 2 * 2**30)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


ENGINES = "tests/runtime/"  # engines of one small model, which share what they compile


class EnginesTogether(LoadFileScheduling):
    """Each file goes to one process, and all that share engines to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return ENGINES if nodeid.startswith(ENGINES) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> EnginesTogether | None:
    """`--dist loadfile`, but for the longest chain of files."""
    return EnginesTogether(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest chain first, so that no process ends long after the others."""
    items.sort(key=lambda item: not item.nodeid.startswith(ENGINES))


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go():
    """XLA:CPU maps every kernel that it compiles, thousands a model. Programs that are let go stay
    in the cache on disk, but are traced and lowered anew."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
