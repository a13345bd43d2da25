"""Killed, out of disk, two at once: absent, unfinished and resumable, or complete; nothing else."""

import filecmp
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from pathlib import Path

import pytest

from converters import check, converted, from_hf, to_hf
from converters.source import CheckpointError
from deepinfer_jax.runtime import checkpoint as checkpoints

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["converters.from_hf", "converters.to_hf"])


def same_tree(a: Path, b: Path) -> bool:
    files = sorted(str(f.relative_to(a)) for f in a.rglob("*") if f.is_file())
    assert files == sorted(str(f.relative_to(b)) for f in b.rglob("*") if f.is_file())
    return filecmp.cmpfiles(a, b, files, shallow=False)[1:] == ([], [])


def start(convert, *args) -> multiprocessing.Process:
    process = processes.Process(target=convert, args=args, kwargs={"quiet": True})
    process.start()
    return process


def kill_after(process: multiprocessing.Process, seconds: float) -> None:
    process.join(seconds)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
@pytest.mark.parametrize("chains", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_at_random_moments(chains, direction, checkpoint, converted_folder, tmp_path):
    """Chains of five kills and a resumption end in the same bytes as an untouched run."""
    source, wanted, convert = {
        "from_hf": (checkpoint, converted_folder, from_hf.convert),
        "to_hf": (converted_folder, checkpoint, to_hf.convert),
    }[direction]
    began = time.monotonic()
    start(convert, source, tmp_path / "timing").join()
    whole = time.monotonic() - began
    rng = random.Random(f"{direction}{chains}")
    unfinished = complete = 0
    for chain in range(chains):
        target = tmp_path / f"out{chain}"
        partial = target.with_name(target.name + ".partial")
        for _ in range(5):
            kill_after(start(convert, source, target), rng.uniform(0, 0.8 * whole))
            if target.exists():  # it was quicker than the kill: then it is whole
                assert same_tree(wanted, target)
                shutil.rmtree(target)
                complete += 1
            elif partial.exists():
                unfinished += 1
                for path in (target, partial):
                    with pytest.raises(CheckpointError, match="an unfinished conversion"):
                        checkpoints.read(path)
                assert check.main([str(target)]) == 2
        assert same_tree(wanted, convert(source, target, quiet=True))
        assert not partial.exists()
        shutil.rmtree(target)
    assert unfinished >= chains, (unfinished, complete)


@pytest.fixture(scope="session")
def converted_folder(converted) -> Path:
    """The fixture `converted`, under a name that the module of that name does not hide."""
    return converted


def test_resuming_writes_only_what_is_left(checkpoint, tmp_path, monkeypatch):
    """Pieces in the journal are not written again; a torn last line is."""
    target = tmp_path / "out"
    journal = tmp_path / "out.partial" / "journal.jsonl"

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(from_hf, "COMMIT_BYTES", 2**18)
    with monkeypatch.context() as patch:
        patch.setattr(from_hf.store, "write_metadata", stop)
        with pytest.raises(KeyboardInterrupt):
            from_hf.convert(checkpoint, target, quiet=True)
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
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(from_hf.store, "write_metadata", stop)
        with pytest.raises(KeyboardInterrupt):
            from_hf.convert(checkpoint, tmp_path / "out", quiet=True)
    with pytest.raises(CheckpointError, match="left by a conversion with another options"):
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
    assert f'"piece": "{stopped[0].key}", "sha256": {{}}' in journal
    from_hf.convert(checkpoint, target, quiet=True)
    assert same_tree(wanted, target)


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 4 MiB; `resize(mib)` grows it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")

    def resize(mib: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={mib}m", str(folder)], check=True)

    yield folder, resize
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
def test_disk_full(direction, checkpoint, converted_folder, small_disk, monkeypatch):
    disk, resize = small_disk
    source, wanted, convert = {
        "from_hf": (checkpoint, converted_folder, from_hf.convert),
        "to_hf": (converted_folder, checkpoint, to_hf.convert),
    }[direction]
    with pytest.raises(CheckpointError, match=r"bytes needed, 4,[\d,]+ free"):
        convert(source, disk / "out", quiet=True)
    assert not list(disk.iterdir())
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40))  # the check is fooled
    resize(1)
    with pytest.raises(CheckpointError, match="No space left on device.*; run again to resume"):
        convert(source, disk / "out", quiet=True)
    assert [item.name for item in disk.iterdir()] == ["out.partial"]
    resize(64)
    assert same_tree(wanted, convert(source, disk / "out", quiet=True))


def test_two_at_once(checkpoint, converted_folder, tmp_path):
    """Of several converters into one folder one works, the others are refused by the lock."""
    racers = [start(from_hf.convert, checkpoint, tmp_path / "out") for _ in range(4)]
    for racer in racers:
        racer.join()
    assert sorted(racer.exitcode for racer in racers) == [0, 1, 1, 1]
    assert same_tree(converted_folder, tmp_path / "out")


def test_the_lock_names_what_it_means(checkpoint, tmp_path, monkeypatch):
    def meanwhile(*_):
        with pytest.raises(CheckpointError, match="another conversion into this folder is running"):
            from_hf.convert(checkpoint, tmp_path / "out", quiet=True)

    monkeypatch.setattr(from_hf.store, "write_metadata", meanwhile)
    from_hf.convert(checkpoint, tmp_path / "out", quiet=True)
