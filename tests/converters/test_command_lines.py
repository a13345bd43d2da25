"""What the programs say of damage and of places that are not to be written: lines, no traceback."""

import pytest

from converters import check, from_hf, inspect, to_hf
from converters.converted import MANIFEST, SOURCE, WEIGHTS
from converters.target import JOURNAL


@pytest.fixture
def damaged(converted, tmp_path):
    """A converted folder to break: small files copied, the weights by name only."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for item in converted.iterdir():
        if item.is_file():
            (folder / item.name).write_bytes(item.read_bytes())
    (folder / WEIGHTS).symlink_to(converted / WEIGHTS)
    (folder / SOURCE).mkdir()
    for item in (converted / SOURCE).iterdir():
        (folder / SOURCE / item.name).write_bytes(item.read_bytes())
    return folder


@pytest.fixture
def refused(capsys):
    """`refused(program, *arguments)`: the one line of a program that ends with 2."""

    def run(program, *arguments):
        assert program.main([str(argument) for argument in arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
def test_an_output_that_cannot_be_made(direction, checkpoint, converted, tmp_path, refused):
    program, source = {"from_hf": (from_hf, checkpoint), "to_hf": (to_hf, converted)}[direction]
    line = refused(program, source, tmp_path / ("x" * 300), "--quiet")
    assert "File name too long" in line and "x.partial" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [("--workers", 0), ("--workers", -1), ("--memory", 0)])
@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
def test_too_few_threads_or_bytes(direction, option, checkpoint, converted, tmp_path, refused):
    program, source = {"from_hf": (from_hf, checkpoint), "to_hf": (to_hf, converted)}[direction]
    line = refused(program, source, tmp_path / "out", "--quiet", *option)
    assert "bytes for workers = " in line and line.endswith("is too little")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "deepinf', "cannot be read as JSON"),
        ("[1]", "expected an object"),
        (
            '{"format": "deepinfer_jax.converted", "format_version": 1, "options": []}',
            "options: expected an object",
        ),
    ],
)
def test_a_damaged_manifest(text, message, damaged, tmp_path, refused):
    (damaged / MANIFEST).write_text(text, encoding="utf-8")
    for program, *more in ((check,), (check, "--deep"), (inspect,), (to_hf, tmp_path / "out")):
        line = refused(program, damaged, *more)
        assert line.startswith(f"{damaged / MANIFEST}: ") and message in line


def test_a_header_of_the_source_that_is_lost(damaged, tmp_path, refused):
    header = min((damaged / SOURCE).glob("*.header"))
    header.write_bytes(header.read_bytes()[:-9])
    line = refused(to_hf, damaged, tmp_path / "out")
    assert line.startswith(f"{header}: no header of a shard: ")
    header.unlink()
    assert refused(to_hf, damaged, tmp_path / "out").startswith(f"{header}: no header of a shard: ")
    assert not (tmp_path / "out.partial").exists()


def test_weights_that_are_not_there(damaged, refused):
    (damaged / WEIGHTS).unlink()
    assert refused(check, damaged) == f"{damaged / WEIGHTS}: no such folder"


def test_a_damaged_journal(checkpoint, tmp_path, refused):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / JOURNAL).write_bytes(b"\0" * 9 + b"\n")
    line = refused(from_hf, checkpoint, tmp_path / "out", "--quiet")
    assert line.startswith(f"{partial / JOURNAL}: damaged") and "--restart" in line
    assert from_hf.main([str(checkpoint), str(tmp_path / "out"), "--quiet", "--restart"]) == 0


@pytest.mark.parametrize("kind", ["official", "converted"])
def test_an_interrupted_check(kind, checkpoint, converted, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    source = {"official": checkpoint, "converted": converted}[kind]
    monkeypatch.setattr(check, "suspicious", stop)
    monkeypatch.setattr(check.recipes, "raw", stop)
    assert check.main([str(source), "--deep"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
