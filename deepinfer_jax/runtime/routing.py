"""Which replica a request goes to: where its prefix is warm and the queue is short.

    chosen = argmin over replicas of (queue - warm)

queue: tokens that a replica still has to compute, warm: leading tokens of the prompt that it need
not compute. So for a warm prefix a request waits behind at most as many tokens as it saves:

    queue[chosen] <= min(queue) + warm[chosen]

which bounds what a popular prefix can pile onto one replica, and a replica that runs empty is
chosen as soon as the others' queues exceed what they would save. Equal replicas take turns, the
lowest number first. Pure functions of what is given; nothing is remembered here.
"""

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Load:
    """A replica as a request sees it. queue, warm: tokens; given: requests it has got so far."""

    queue: int
    warm: int
    given: int


def warm(loads: Sequence[Load]) -> int:
    """The place of the replica whose queue, less what it saves, is shortest."""
    return _least(loads, lambda load: load.queue - load.warm)


def short(loads: Sequence[Load]) -> int:
    """The place of the replica whose queue is shortest, wherever prefixes are."""
    return _least(loads, lambda load: load.queue)


def turns(loads: Sequence[Load]) -> int:
    """The place of the replica that got the fewest requests."""
    return _least(loads, lambda load: 0)


Route = Callable[[Sequence[Load]], int]
ROUTES: dict[str, Route] = {"warm": warm, "short": short, "turns": turns}


def _least(loads: Sequence[Load], cost: Callable[[Load], int]) -> int:
    if not loads:
        raise ValueError("routing: there is no replica")
    return min(range(len(loads)), key=lambda at: (cost(loads[at]), loads[at].given, at))
