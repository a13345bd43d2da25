"""Folders compared, for the tests of interruption and resumption."""

import filecmp
from pathlib import Path


def same_tree(a: Path, b: Path) -> bool:
    files = sorted(str(f.relative_to(a)) for f in a.rglob("*") if f.is_file())
    assert files == sorted(str(f.relative_to(b)) for f in b.rglob("*") if f.is_file())
    return filecmp.cmpfiles(a, b, files, shallow=False)[1:] == ([], [])
