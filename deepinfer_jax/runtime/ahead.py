"""Compiling the decode step while the prompts' own program compiles and runs.

Every request needs both, one after the other; begun together, on two cores they take little more
than the longer one. What is begun is what the first decode step after these prompts will ask for;
where that turns out another (a request aborted, one of more shards than expected), it compiles as
it always did, when it is first used.
"""

from collections.abc import Sequence

from deepinfer_jax.runtime.loop import Loop
from deepinfer_jax.runtime.requests import Sample


def begin(loops: Sequence[Loop], samples: Sequence[Sample]) -> None:
    """Begins to compile the decode step of samples that have just entered, unless it was begun.

    loops: those that decode, of which each gets its part of the samples; one that has given its
    work back has no state and compiles nothing. Adaptive speculation chooses among several steps,
    which are compiled when their costs are measured.
    """
    going = tuple(one for one in samples if not one.finished and one.limit > 1 + len(one.tokens))
    if not going or any(sample.routes is not None for sample in going):
        return
    for loop in loops:
        if loop.adaptive or loop.state is None:
            continue
        shapes, programs = loop.buckets(), loop.programs
        needed = programs.divided(min(-(-len(going) // len(loops)), loop.policy.slots))
        groups = min(n for n in shapes if n >= needed)
        options, size = loop.options_for(going, score=False), shapes[groups][-1]
        if (size, options) not in programs.begun:
            programs.begun.add((size, options))
            given = loop.desk.decode(
                groups, size, options.block, (), loop.pages, loop.calibration.temperature
            )
            programs.begin_decode(size, options, loop.state, loop.grammars.pool, given)
