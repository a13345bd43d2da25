"""Requests are taken while there is room, and given back as they grow and when they finish.

A turn of the loop changes few of the requests in work, so nobody looks through all of them: a
sample that gets a token or ends enters its number in a set (`Sample.grown`), and only the requests
of those are looked at.
"""

from collections.abc import Callable, Iterator
from typing import Any

from deepinfer_jax.runtime.outputs import RequestOutput
from deepinfer_jax.runtime.requests import Sample


def deliver(
    loop: Any,
    enter: Callable[..., list[Sample]],
    work: Iterator[tuple[Any, Any]],
    window: int,
    growing: bool,
    begin: Callable[[list[Sample]], None],
) -> Iterator[tuple[int, RequestOutput]]:
    """(number, request) of those that have finished; growing: before that whenever they have grown.

    loop: what does the work, a `Loop` or what has its face; enter: gives it a request, a prompt and
    parameters, with the set for its samples' numbers, and returns the samples; work: (prompt,
    parameters); window: most requests taken and not finished; begin: is told the samples that there
    are before the first turn.
    """
    live: dict[int, tuple[RequestOutput, list[Sample]]] = {}
    owner: dict[int, int] = {}  # sample -> request
    grown: set[int] = set()  # samples
    taken, more = 0, True
    try:
        while more or live:
            first = taken == 0
            while more and len(live) < max(window, 1):
                try:
                    prompt, params = next(work)
                except StopIteration:
                    more = False
                    break
                request = RequestOutput(prompt if isinstance(prompt, str) else None, [])
                samples = enter(request, prompt, params, grown)
                live[taken] = request, samples
                owner |= {sample.number: taken for sample in samples}
                taken += 1
            if first:
                begin([sample for _, samples in live.values() for sample in samples])
            # Those of a finished request can still be there: who listens may have made turns too.
            news = sorted({owner[number] for number in grown if number in owner})
            grown.clear()
            for number in news:
                request, samples = live[number]
                if request.finished:
                    del live[number]
                    for sample in samples:
                        del owner[sample.number]
                elif growing:
                    for sample in samples:
                        sample.show()
                else:
                    continue
                yield number, request
            if len(loop):
                loop.turn()
    except GeneratorExit:  # the caller stopped listening, between two turns
        for _, samples in live.values():
            for sample in samples:
                loop.abort(sample)
        loop.drain()
        raise
    except BaseException:  # an interrupt, say: nobody knows how far a turn got
        loop.reset()
        raise
    loop.drain()
