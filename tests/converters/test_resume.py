"""Resumed after an interruption: what is durable is kept, checked, and not written again."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from converters import check, converted, from_hf, to_hf
from converters import safetensors_io as st
from converters.source import CheckpointError
from tests.converters.trees import same_tree

ROOT = Path(__file__).parents[2]


def interrupt(monkeypatch, owner, name: str, work, source: Path, target: Path) -> None:
    """A conversion stopped from the keyboard where it would call `owner.name`."""

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        with pytest.raises(KeyboardInterrupt):
            work.convert(source, target, quiet=True)


def test_resuming_writes_only_what_is_left(checkpoint, tmp_path, monkeypatch):
    """Pieces in the journal are not written again; a torn last line is."""
    target = tmp_path / "out"
    journal = tmp_path / "out.partial" / "journal.jsonl"

    monkeypatch.setattr(from_hf, "COMMIT_BYTES", 2**18)
    interrupt(monkeypatch, from_hf.store, "write_metadata", from_hf, checkpoint, target)
    lines = journal.read_text().splitlines(keepends=True)
    kept = len(lines) // 2
    journal.write_text("".join(lines[:kept]) + lines[kept][:20])
    written = []
    create = from_hf.store.create

    def spy(folder, path, *args):
        written.append(path)
        return create(folder, path, *args)

    monkeypatch.setattr(from_hf.store, "create", spy)
    from_hf.convert(checkpoint, target, quiet=True)
    assert len(written) == len(lines) - kept
    assert not list(converted_problems(target))


def converted_problems(path: Path):
    return check.verify(converted.open_converted(path))


def test_another_source_or_option_is_not_mixed_in(checkpoint, tmp_path, monkeypatch):
    interrupt(monkeypatch, from_hf.store, "write_metadata", from_hf, checkpoint, tmp_path / "out")
    with pytest.raises(CheckpointError, match="left by a conversion with other options"):
        from_hf.convert(checkpoint, tmp_path / "out", text_only=True, quiet=True)
    out = from_hf.convert(checkpoint, tmp_path / "out", text_only=True, restart=True, quiet=True)
    assert not list(converted_problems(out))


def test_a_table_cut_in_the_middle_resumes_its_digest(checkpoint, tmp_path, monkeypatch):
    """A tensor of several pieces: the rows already written are hashed again, not written again."""
    target = tmp_path / "out"
    monkeypatch.setattr(from_hf, "SHARD_BYTES", 2**12)
    monkeypatch.setattr(from_hf, "COMMIT_BYTES", 1)
    wanted = from_hf.convert(checkpoint, tmp_path / "wanted", quiet=True)
    land = from_hf._Conversion._land
    seen, stopped = [], []

    def stop_inside_a_table(self, piece, *args):
        land(self, piece, *args)
        seen.append(piece)
        if sum(piece.leaf == other.leaf for other in seen) == 3 and piece.parts[0].begin:
            stopped.append(piece)  # other workers may land more pieces after it
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(from_hf._Conversion, "_land", stop_inside_a_table)
        with pytest.raises(KeyboardInterrupt):
            from_hf.convert(checkpoint, target, quiet=True)
    journal = (tmp_path / "out.partial" / "journal.jsonl").read_text()
    (record,) = [
        r for r in map(json.loads, journal.splitlines()) if r.get("piece") == stopped[0].key
    ]
    assert record["sha256"] == {}  # of a tensor that goes on
    from_hf.convert(checkpoint, target, quiet=True)
    assert same_tree(wanted, target)


def journal(partial: Path) -> dict[str, dict]:
    """The latest record of every piece."""
    lines = (partial / "journal.jsonl").read_text().splitlines()[1:]
    return {record["piece"]: record for record in map(json.loads, lines)}


def interrupt_to_hf(source: Path, target: Path, slices: int, monkeypatch) -> dict[str, dict]:
    """Write back in slices of 4 KiB, so that tensors are cut as well, and stop after so many."""
    left = iter(range(slices))

    def stop(_):
        if next(left, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(to_hf, "COMMIT_BYTES", 2**12)
    with monkeypatch.context() as patch:
        patch.setattr(to_hf.Workers, "check", stop)
        with pytest.raises(KeyboardInterrupt):
            to_hf.convert(source, target, memory=2**14, workers=1, quiet=True)
    return journal(target.with_name(target.name + ".partial"))


def longest_cut(records: dict[str, dict]) -> str:
    """The file that was being written."""
    cut = {name: record["bytes"] for name, record in records.items() if not record["whole"]}
    return max(cut, key=lambda name: cut[name])


@pytest.mark.parametrize("slices", [40, 300])
def test_writing_back_resumes_inside_a_file(
    slices, checkpoint, converted_folder, tmp_path, monkeypatch
):
    """What the journal says is durable is not written again, and what follows it is."""
    target = tmp_path / "back"
    records = interrupt_to_hf(converted_folder, target, slices, monkeypatch)
    sizes = {file.name: file.stat().st_size for file in checkpoint.glob("*.safetensors")}
    cut = longest_cut(records)
    assert 0 < records[cut]["bytes"] < sizes[cut]
    with (tmp_path / "back.partial" / cut).open("ab") as file:
        file.write(b"written, and not journalled any more")
    written = []
    write = to_hf._write

    def spy(file, data):
        written.append(len(data))
        return write(file, data)

    monkeypatch.setattr(to_hf, "_write", spy)
    assert same_tree(checkpoint, to_hf.convert(converted_folder, target, quiet=True))
    durable = sum(record["bytes"] for record in records.values())
    assert sum(written) == sum(sizes.values()) - durable


def test_a_tensor_cut_in_two_is_checked_as_a_whole(
    checkpoint, converted_folder, tmp_path, monkeypatch
):
    """Damage to the durable part of a tensor that goes on after the kill is found."""
    target = tmp_path / "back"
    for slices in range(300, 400):
        records = interrupt_to_hf(converted_folder, target, slices, monkeypatch)
        cut = longest_cut(records)
        end = records[cut]["bytes"]
        tensors = st.read_header(checkpoint / cut).tensors.values()
        if any(tensor.start < end < tensor.start + tensor.nbytes for tensor in tensors):
            break
        shutil.rmtree(tmp_path / "back.partial")
    with (tmp_path / "back.partial" / cut).open("r+b") as file:
        file.seek(end - 1)
        byte = file.read(1)
        file.seek(end - 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointError, match="its bytes are not those that were converted"):
        to_hf.convert(converted_folder, target, quiet=True)
    assert not target.exists()


def test_the_last_tensor_is_checked_before_a_file_counts_as_whole(
    converted_folder, tmp_path, monkeypatch
):
    """Killed between the last byte of a file and the comparison of its last digest."""

    interrupt(monkeypatch, to_hf.Target, "finish", to_hf, converted_folder, tmp_path / "back")
    file = tmp_path / "back.partial" / "journal.jsonl"
    file.write_text(file.read_text().replace('"whole": true', '"whole": false'))
    shard = sorted((tmp_path / "back.partial").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="its bytes are not those that were converted"):
        to_hf.convert(converted_folder, tmp_path / "back", quiet=True)


@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
@pytest.mark.parametrize("damage", ["cut short", "gone"])
def test_a_journalled_file_must_still_be_there(
    direction, damage, checkpoint, converted_folder, tmp_path, monkeypatch
):
    """The journal is believed only of files that have their size; others are written again."""
    source, wanted, work = {
        "from_hf": (checkpoint, converted_folder, from_hf),
        "to_hf": (converted_folder, checkpoint, to_hf),
    }[direction]

    interrupt(monkeypatch, work.Target, "finish", work, source, tmp_path / "out")
    records = [r for r in journal(tmp_path / "out.partial").values() if r["whole"]]
    assert len(records) >= 3
    for record in records[1::2]:
        file = tmp_path / "out.partial" / record["file"]
        if damage == "gone":
            file.unlink()
        else:
            os.truncate(file, record["bytes"] // 2)
    assert same_tree(wanted, work.convert(source, tmp_path / "out", quiet=True))


def test_a_source_that_changed_is_not_mixed_in(broken, tmp_path, monkeypatch):
    """Other bytes under the same names and sizes: seen by the files' times, before and after."""
    shard = next(broken.glob("*.safetensors"))

    def touch(*_):
        os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(from_hf.store, "write_metadata", touch)
        with pytest.raises(KeyboardInterrupt):
            from_hf.convert(broken, tmp_path / "out", quiet=True)
    with pytest.raises(CheckpointError, match="other times of the source's files"):
        from_hf.convert(broken, tmp_path / "out", quiet=True)
    run = from_hf._Conversion.run

    def meanwhile(self, progress):
        os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
        return run(self, progress)

    monkeypatch.setattr(from_hf._Conversion, "run", meanwhile)
    with pytest.raises(CheckpointError, match="changed while they were converted"):
        from_hf.convert(broken, tmp_path / "out", restart=True, quiet=True)
    assert not (tmp_path / "out").exists()


# After a few pieces it says so and waits. A test run started in the background ignores SIGINT, and
# so would its children.
WAITING = """
import signal, sys, time
from converters import from_hf, to_hf, workers

signal.signal(signal.SIGINT, signal.default_int_handler)
check = workers.Workers.check
checks = iter(range(12))

def wait(self):
    left = next(checks, None)
    if left == 11:
        print("waiting", flush=True)
    while left is None:
        check(self)
        time.sleep(0.01)

workers.Workers.check = wait
sys.exit({"from_hf": from_hf, "to_hf": to_hf}[sys.argv[1]].main(sys.argv[2:]))
"""


@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
def test_interrupted_from_the_keyboard(direction, checkpoint, converted_folder, tmp_path):
    """One line, exit code 130, and what was written is kept for the next run."""
    source, wanted, work = {
        "from_hf": (checkpoint, converted_folder, from_hf),
        "to_hf": (converted_folder, checkpoint, to_hf),
    }[direction]
    target, partial = tmp_path / "out", tmp_path / "out.partial"
    command = [sys.executable, "-c", WAITING, direction, str(source), str(target), "--quiet"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said == "interrupted; run the same command again to resume\n"
    assert not target.exists() and journal(partial)
    assert same_tree(wanted, work.convert(source, target, quiet=True))
