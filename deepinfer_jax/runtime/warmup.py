"""Before the first request: compile every program of an engine, and time its decode steps.

Programs are compiled by running them with no slot in use, which changes nothing. Step times are
taken with every slot at work on a scratch state; they depend on model, numerics, shapes and machine
alone, so they are kept on disk under a name made from those:

    CACHE/steps-<digest>.json = {"what": ..., "seconds": [[groups, rows, seconds], ...]}
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.runtime import cluster
from deepinfer_jax.runtime import state as states
from deepinfer_jax.runtime.loop import Loop
from deepinfer_jax.runtime.programs import ADMITS_A_CALL
from deepinfer_jax.runtime.sampling_params import MAX_LOGPROBS
from deepinfer_jax.runtime.step_types import DecodeInput, Options, PrefillInput, Results

RUNS = 5
LENGTH = 64  # tokens of each sequence in a timed step


def default_folder() -> Path:
    """Where measurements and compiled programs are kept unless a folder is named."""
    return Path.home() / ".cache" / "deepinfer_jax"


def keep_programs(folder: Path | None) -> Path:
    """Tells jax to keep compiled programs in a folder, None: the default one; a place that was set
    for jax otherwise stays. Returns the folder."""
    folder = default_folder() if folder is None else folder
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    return folder


def compile_all(loop: Loop, *, logprobs: bool = True, scores: bool = True) -> None:
    """Compiles every program, several at once, and runs each once with nothing to do.

    logprobs: also those that report alternatives; scores: also those for prompt log-probabilities.
    """
    setup, width = loop.programs.setup, loop.programs.setup.cfg.vocab_size
    wide = loop.options._replace(top=min(MAX_LOGPROBS, width))
    several = (loop.options, wide) if logprobs else (loop.options,)
    steps: list[tuple[Any, ...]] = []
    for groups, sizes in loop.buckets().items() if loop.policy.decodes else ():
        given = loop.desk.decode(
            groups, groups, loop.options.block, (), loop.pages, loop.calibration.temperature
        )
        steps += [(_decode, size, options, given) for size in sizes for options in several]
    for height, chunk in loop.policy.prefill:
        given = loop.desk.prefill(height, chunk, (), loop.pages)
        tails = {chunk}
        if setup.numerics.replay == "compact":
            tails |= {0, min(setup.cfg.replay_keep, chunk)}
        for tail in sorted(tails):
            steps += [(_prefill, tail, False, options, given) for options in several]
        if scores:
            steps.append((_prefill, chunk, True, wide, given))
    _begin(loop, steps)
    for run, *arguments in steps:
        run(loop, *arguments)
    _compile_moves(loop)
    loop.grammars.warm()
    jax.block_until_ready(loop.state)


def _begin(loop: Loop, steps: list[tuple[Any, ...]]) -> None:
    """Compiles the programs of steps in several threads."""
    for run, *choices, given in steps:
        begin: Any = loop.programs.begin_prefill
        if run is _decode:
            begin = loop.programs.begin_decode
        begin(*choices, loop.state, loop.grammars.pool, given)


def _compile_moves(loop: Loop) -> None:
    """Admission and preemption, on slot 0: called while no request is in one."""
    none = np.full(loop.pages.per_slot, -1, np.int32)
    saved = jax.device_get(loop.programs.take(loop.state, 0, none))
    loop.state = loop.programs.put(loop.state, 0, none, saved)
    loop.programs.grammar(loop.state, 0)
    for count in (1, ADMITS_A_CALL):
        loop.state = loop.programs.admit(loop.state, *loop.mover.rows((), count))
    if loop.prefix is not None:
        rings = loop.programs.take_rings(loop.state, 0)
        loop.state = loop.programs.put_rings(loop.state, 0, rings)
        content = loop.programs.take_pages(loop.state, [0])
        loop.state = loop.programs.put_pages(loop.state, [(0, content[0])])


def step_seconds(loop: Loop, folder: Path) -> dict[tuple[int, int], float]:
    """Seconds of a decode step by (groups, rows), from disk or measured and kept there."""
    what = _identity(loop)
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:20]
    file = folder / f"steps-{digest}.json"
    kept = cluster.from_first(
        lambda: json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    )
    if kept is None:
        found = measure(loop)
        seconds = [[groups, rows, value] for (groups, rows), value in found.items()]
        kept = cluster.from_first(lambda: {"what": what, "seconds": seconds})
        if cluster.is_first():
            folder.mkdir(parents=True, exist_ok=True)
            written = file.with_suffix(f".{time.time_ns()}")  # renamed when whole: engines may race
            written.write_text(json.dumps(kept), encoding="utf-8")
            written.replace(file)
    return {(groups, rows): value for groups, rows, value in kept["seconds"]}


def measure(loop: Loop) -> dict[tuple[int, int], float]:
    """Median seconds of a decode step in every bucket, with every slot and every row in use.

    Called while no request is in a slot: the state is used for it and then emptied.
    """
    slots, block = loop.policy.slots, loop.options.block
    start = max(min(LENGTH, loop.context - RUNS * (1 + block) - 1), 1)
    table, found = _pages(loop), {}
    blank = {
        groups: loop.desk.decode(
            groups, groups, block, (), loop.pages, loop.calibration.temperature
        )
        for groups in loop.buckets()
    }
    every = [(groups, size) for groups, sizes in loop.buckets().items() for size in sizes]
    _begin(loop, [(_decode, size, loop.options, blank[groups]) for groups, size in every])
    for groups, sizes in loop.buckets().items():
        used = _spread(loop, groups)
        given = dataclasses.replace(
            blank[groups],
            slot=used,
            pages=table[used],
            room=np.full(groups, block, np.int32),
        )
        for size in sizes:
            draft_rows = np.full_like(given.budget, (size - groups) // loop.pages.shards)
            given = dataclasses.replace(given, budget=draft_rows)
            seconds = []
            for _ in range(RUNS + 1):
                again = (
                    np.full(slots, states.FOREVER, np.int32),
                    np.full(slots, start, np.int32),
                    np.zeros(slots, np.bool_),
                )
                limit, length, done = loop.programs.place(again)
                loop.state = dataclasses.replace(loop.state, limit=limit, length=length, done=done)
                seconds.append(_timed(loop, _decode, loop, size, loop.options, given))
            found[groups, size] = statistics.median(seconds[1:])
    loop.state = loop.empty_state()
    return found


def measure_prefill(loop: Loop) -> dict[tuple[int, int], float]:
    """Median seconds of a prefill step of every shape, each place in use; called as `measure`."""
    table, found = _pages(loop), {}
    for height, width in loop.policy.prefill:
        turns = min(height, loop.policy.slots)
        used = _spread(loop, turns)
        places = loop.pages.places(used.tolist(), height)
        given = loop.desk.prefill(height, width, (), loop.pages)
        given.slot[places] = used
        given.count[:], given.prompt[:], given.last[:] = width, width, True
        given.pages[places] = table[used]
        seconds = [
            _timed(loop, _prefill, loop, width, False, loop.options, given) for _ in range(RUNS + 1)
        ]
        found[height, width] = statistics.median(seconds[1:])
    loop.state = loop.empty_state()
    return found


def _pages(loop: Loop) -> np.ndarray:
    """A page table in which every slot has as many pages of its own as there are."""
    slots, per_slot, shards = loop.policy.slots, loop.pages.per_slot, loop.pages.shards
    total = loop.pages.total
    held = min(per_slot, max(total // slots, 1))
    table = np.full((slots, per_slot), -1, np.int32)
    # Of the shard's own run; slots past its end have none.
    own = np.arange(slots // shards * held, dtype=np.int32).reshape(1, -1, held)
    own = np.where(own < total // shards, own, -total)
    own = own + np.arange(shards, dtype=np.int32)[:, None, None] * (total // shards)
    table[:, :held] = np.maximum(own, -1).reshape(slots, held)
    return table


def _spread(loop: Loop, groups: int) -> np.ndarray:
    """So many slots, equally many of each shard, in order."""
    shards, slots = loop.pages.shards, loop.policy.slots
    return np.arange(slots, dtype=np.int32).reshape(shards, -1)[:, : groups // shards].reshape(-1)


def _timed(loop: Loop, run: Callable[..., Any], *given: Any) -> float:
    jax.block_until_ready(loop.state)
    begin = time.perf_counter()
    jax.block_until_ready(run(*given))
    return time.perf_counter() - begin


def _prefill(loop: Loop, tail: int, score: bool, options: Options, given: PrefillInput) -> Results:
    loop.state, output = loop.programs.prefill(
        tail, score, options, loop.state, loop.grammars.pool, given
    )
    return output


def _decode(loop: Loop, size: int, options: Options, given: DecodeInput) -> Results:
    loop.state, output = loop.programs.decode(size, options, loop.state, loop.grammars.pool, given)
    return output


def _identity(loop: Loop) -> dict[str, Any]:
    """What step times depend on, as JSON."""
    setup, device = loop.programs.setup, loop.programs.device
    return {
        "model": repr(setup.cfg),
        "layout": repr(setup.layout),
        "kernels": repr(setup.kernels),
        "numerics": repr(setup.numerics),
        "options": list(map(str, loop.options)),
        "buckets": {str(groups): sizes for groups, sizes in loop.buckets().items()},
        "context": loop.context,
        "device": [device.platform, device.device_kind],
        "jax": importlib.metadata.version("jax"),
    }
