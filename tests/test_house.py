"""The house rules that a machine can keep: import directions, strictness, sizes, lazy loading.

Everything is read with ``ast``, so an import inside a function counts like one at the top. The
direction of imports is the table ``MAY_IMPORT``; a new module outside the rows below needs a row.
"""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("deepinfer_jax", "pallas_kernels", "converters")
TOP_LEVEL = {
    *PACKAGES,
    "tests",
    "configs",
    "docs",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CONTRIBUTING.md",
}

# unit -> units of ours that it may import. A module belongs to the unit with the longest matching
# name, and may always import its own unit. Third-party libraries are free, but see NO_JAX.
BASE = {
    "deepinfer_jax.config",
    "deepinfer_jax.schedule",
    "deepinfer_jax.spec",
    "deepinfer_jax.layout",
    "deepinfer_jax.shipped",
}
MODEL = BASE | {"deepinfer_jax.model", "pallas_kernels"}
RUNTIME = MODEL | {
    "deepinfer_jax.structured",
    "deepinfer_jax.runtime",
    "deepinfer_jax.runtime.plans",
    "deepinfer_jax.runtime.scheduler",
    "deepinfer_jax.runtime.pages",
    "deepinfer_jax.runtime.step",
}
READERS = {"converters", "converters.safetensors_io", "converters.names"}  # not the conversions
CONVERTERS = READERS | {"converters.from_hf", "converters.to_hf"}
CHECKPOINT = {"deepinfer_jax.runtime.checkpoint"}
DEMO = {"deepinfer_jax.demo"}
MAY_IMPORT = {
    "pallas_kernels": set(),
    "deepinfer_jax": set(),
    "deepinfer_jax.shipped": set(),
    "deepinfer_jax.config": BASE,
    "deepinfer_jax.schedule": BASE,
    "deepinfer_jax.spec": BASE,
    "deepinfer_jax.layout": BASE,
    "deepinfer_jax.model": MODEL,
    "deepinfer_jax.structured": set(),
    "deepinfer_jax.lab": BASE | {"pallas_kernels"},
    "deepinfer_jax.runtime": RUNTIME | CHECKPOINT | DEMO,
    "deepinfer_jax.runtime.plans": set(),
    "deepinfer_jax.runtime.scheduler": {"deepinfer_jax.runtime.plans"},
    "deepinfer_jax.runtime.pages": set(),
    "deepinfer_jax.runtime.step": MODEL | {"deepinfer_jax.runtime", "deepinfer_jax.structured"},
    "deepinfer_jax.runtime.checkpoint": RUNTIME | READERS,
    "deepinfer_jax.demo": MODEL | CONVERTERS,
    "deepinfer_jax.demo.report": RUNTIME | CHECKPOINT | DEMO | MODEL | {"deepinfer_jax"},
    "deepinfer_jax.bench": RUNTIME | DEMO | {"deepinfer_jax.bench.counts", "deepinfer_jax.lab"},
    "deepinfer_jax.bench.counts": BASE,
    "deepinfer_jax.chat": RUNTIME,
    "deepinfer_jax.commands": RUNTIME
    | CHECKPOINT
    | DEMO
    | {"deepinfer_jax.bench", "deepinfer_jax.lab"},
    "deepinfer_jax.cli": RUNTIME
    | CHECKPOINT
    | CONVERTERS
    | DEMO
    | {"deepinfer_jax.bench", "deepinfer_jax.chat", "deepinfer_jax.commands"}
    | {"deepinfer_jax.lab", "deepinfer_jax"},
    "converters.safetensors_io": set(),
    "converters.names": BASE | {"deepinfer_jax.model", "converters.safetensors_io"},
    "converters": READERS | BASE | {"deepinfer_jax.model"},
    "converters.from_hf": READERS | BASE | {"deepinfer_jax.model"},
    "converters.to_hf": READERS | BASE | {"deepinfer_jax.model"},
}
NO_JAX = {
    "deepinfer_jax.runtime.scheduler",
    "deepinfer_jax.runtime.pages",
    "deepinfer_jax.shipped",
}


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    _module_name(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def _unit(module: str) -> str | None:
    """Row of MAY_IMPORT for a module of ours ("?": it has none); None for another's module."""
    if module.split(".")[0] not in PACKAGES:
        return None
    units = [unit for unit in MAY_IMPORT if module == unit or module.startswith(unit + ".")]
    if module != "deepinfer_jax" and units == ["deepinfer_jax"]:
        return "?"
    return max(units, key=len)


def _imports(name: str) -> Iterator[tuple[str, int]]:
    """(module, line) of each import in a module; ``from p import m`` names p.m if that is one."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in FILES else base), node.lineno


def _where(name: str, line: int) -> str:
    return f"{FILES[name].relative_to(ROOT)}:{line}"


def _sites(predicate) -> list[str]:
    """Each place in our packages whose syntax node satisfies ``predicate``."""
    return [
        _where(name, node.lineno)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if predicate(node)
    ]


def test_import_directions():
    wrong = []
    for name in FILES:
        unit = _unit(name)
        if unit == "?":
            wrong.append(f"{_where(name, 1)}: {name} has no row in MAY_IMPORT")
            continue
        for target, line in _imports(name):
            other = _unit(target)
            if other not in (None, unit) and other not in MAY_IMPORT[unit]:
                wrong.append(f"{_where(name, line)}: {unit} may not import {target}")
    assert not wrong, "\n".join(wrong)


def test_no_jax_on_the_host_side():
    heavy = {"jax", "jaxlib", "flax", "jaxtyping", "orbax"}
    wrong = [
        f"{_where(name, line)}: imports {target}"
        for name in FILES
        if name in NO_JAX
        for target, line in _imports(name)
        if target.split(".")[0] in heavy
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles():
    edges = {name: {t for t, _ in _imports(name) if t in FILES and t != name} for name in FILES}
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for target in sorted(edges[name]):
            walk(target, (*trail, name))
        done.add(name)

    for name in sorted(FILES):
        walk(name, ())


def test_annotations_are_real():
    """jaxtyping checks need evaluated annotations and imports that always happen."""
    assert not _sites(lambda node: isinstance(node, ast.ImportFrom) and node.module == "__future__")
    assert not _sites(
        lambda node: "TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", ""))
    )


def test_no_hidden_switches():
    """Behaviour comes from arguments: no environment variables, no rebinding of module globals."""
    names = {"environ", "environb", "getenv", "putenv"}
    assert not _sites(
        lambda node: (
            (isinstance(node, ast.Attribute) and node.attr in names)
            or (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in names for alias in node.names)
            )
        )
    )
    assert not _sites(lambda node: isinstance(node, ast.Global))


def _swallows(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    broad = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
    return broad and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)


def test_no_stubs_and_no_swallowed_errors():
    assert not _sites(_swallows)
    assert not _sites(
        lambda node: (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and getattr(node.exc.func, "id", "") == "NotImplementedError"
            and not node.exc.args
        )
    ), "NotImplementedError says why"


def test_files_are_short_and_say_what_they_are():
    paths = [*FILES.values(), *TESTS]
    long = [p for p in paths if len(p.read_text(encoding="utf-8").splitlines()) > 400]
    assert not long, "over 400 lines, split by mechanism: " + ", ".join(map(str, long))
    silent = [name for name, tree in TREES.items() if not ast.get_docstring(tree)]
    assert not silent, f"no module docstring: {silent}"


def test_top_level():
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    ignored = {"build", "dist"}
    assert found <= TOP_LEVEL | ignored, sorted(found - TOP_LEVEL - ignored)


def _python(code: str, **env: str) -> None:
    """Run code in a new interpreter at the repository root; only ``env`` is its environment."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_jax():
    _python(
        "import sys, deepinfer_jax; dir(deepinfer_jax)\n"
        "heavy = {'jax', 'flax', 'numpy', 'orbax'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )


def test_importing_converters_needs_no_kernel_and_no_device():
    """An unknown platform makes jax raise as soon as anything asks for a device."""
    modules = [name for name in FILES if name.startswith("converters")]
    _python(
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        "late = [n for n in sys.modules if n.startswith('pallas_kernels.')\n"
        "        and n.split('.')[-1] in ('reference', 'xla', 'hopper', 'blackwell')]\n"
        "assert not late, late\n"
        "assert 'jax.experimental.pallas' not in sys.modules",
        JAX_PLATFORMS="no-such-platform",
    )


def test_public_names():
    import deepinfer_jax

    for name in deepinfer_jax.__all__:
        assert importlib.util.find_spec(deepinfer_jax._HOMES[name]) is not None, name
        assert getattr(deepinfer_jax, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        deepinfer_jax.no_such_name  # noqa: B018
