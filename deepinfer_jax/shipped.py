"""Where the shipped ``configs/`` are: beside the packages in a checkout, inside ours in a wheel.

A name such as "v41-flash" stands for ``configs/<kind>/<name>.<suffix>``; anything that is a file
already is taken as it is, so that every option that takes a name takes a path too.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def configs() -> Path:
    """The folder ``configs`` of this installation."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def find(kind: str, name: str | Path) -> Path:
    """Path of a shipped file by kind ("models", "layouts") and name, or of the user's own file.

    Raises FileNotFoundError naming the kind, the name and the names that there are.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = {path.stem: path for path in sorted((configs() / kind).iterdir()) if path.is_file()}
    if str(name) not in shipped:
        raise FileNotFoundError(
            f"{kind}: no file and no shipped name {str(name)!r}; shipped: {', '.join(shipped)}"
        )
    return shipped[str(name)]
