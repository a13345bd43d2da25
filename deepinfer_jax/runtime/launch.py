"""Hands an engine's steps over to the device in a thread of its own.

Handing a step over costs the host milliseconds on a GPU: a CUDA graph of thousands of kernels. The
compiler's runtime does that without Python's lock, so meanwhile the engine's thread reads the step
before and plans the next one. Steps are handed over in order, each with the state that the one
before it gave.
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any

Task = concurrent.futures.Future[Any]
Program = Callable[[Any], tuple[Any, Any]]  # a state, which is donated -> the next one, results


class Launcher:
    """The state of an engine's slots, and the thread that hands its steps over.

    inline: steps are handed over by whoever calls, in one order with all other programs; several
    processes need that.
    """

    def __init__(self, *, inline: bool):
        self._threads = None if inline else concurrent.futures.ThreadPoolExecutor(1, "launch")
        self._coming: Task | None = None
        self._state: Any = None

    @property
    def state(self) -> Any:
        """The state after the newest step. Waits until that is handed over, not until it is done;
        raises what went wrong there."""
        self.settle()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        if self._coming is not None:  # broken off: its error, if any, is its results' too
            concurrent.futures.wait([self._coming])
            self._coming = None
        self._state = state

    def settle(self) -> None:
        """Waits until every step is handed over: what it reads may be donated to another program
        only then."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            coming.result()

    def launch(self, program: Program) -> Task:
        """Hands over a step; its results, once it is handed over."""
        state, self._state = self.state, None

        def run() -> Any:
            self._state, results = program(state)
            return results

        if self._threads is None:
            self._coming = concurrent.futures.Future()
            self._coming.set_result(run())
        else:
            self._coming = self._threads.submit(run)
        return self._coming
