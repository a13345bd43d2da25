"""Killed, out of disk, two at once: absent, unfinished and resumable, or complete; nothing else."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections import namedtuple

import pytest

from converters import check, from_hf, to_hf, workers
from converters.source import CheckpointError
from deepinfer_jax.runtime import checkpoint as checkpoints
from tests.converters.trees import same_tree

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["converters.from_hf", "converters.to_hf"])


def start(convert, *args) -> multiprocessing.Process:
    process = processes.Process(target=convert, args=args, kwargs={"quiet": True})
    process.start()
    return process


def counted(convert, moment, delay, total, *args) -> None:
    """A conversion in a child: `total` is how often it checked for an end or synced a file; at
    `moment` of these, `delay` seconds later, it is killed while its other threads go on."""

    def at(function):
        def then(*args):
            with total.get_lock():
                total.value += 1
                last = total.value == moment
            if last:
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return then

    workers.Workers.check = at(workers.Workers.check)
    os.fsync, os.sync = at(os.fsync), at(os.sync)
    convert(*args, quiet=True)


def convert_until(moment: int, delay: float, convert, *args) -> int:
    """Convert in a child that is killed at `moment` (0: never); the moments it came to."""
    total = processes.Value("i", 0)
    process = processes.Process(target=counted, args=(convert, moment, delay, total, *args))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return total.value


@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
@pytest.mark.parametrize("chains", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_at_random_moments(chains, direction, checkpoint, converted_folder, tmp_path):
    """Chains of five kills and a resumption end in the same bytes as an untouched run."""
    source, wanted, convert = {
        "from_hf": (checkpoint, converted_folder, from_hf.convert),
        "to_hf": (converted_folder, checkpoint, to_hf.convert),
    }[direction]
    moments = convert_until(0, 0, convert, source, tmp_path / "counted")
    rng = random.Random(f"{direction}{chains}")
    unfinished = complete = 0
    for chain in range(chains):
        target = tmp_path / f"out{chain}"
        partial = target.with_name(target.name + ".partial")
        for _ in range(5):
            moment, delay = rng.randint(1, moments), rng.uniform(0, 2e-3)
            convert_until(moment, delay, convert, source, target)
            if target.exists():  # resumed, it had fewer moments than that left: then it is whole
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
    assert unfinished >= 2 * chains, (unfinished, complete)


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
