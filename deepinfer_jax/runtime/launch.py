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
        """Hands over a step after those before it; its results, once it is handed over. The
        caller does not wait, so that the thread finds the next step when it is done with one."""

        def run() -> Any:
            state, self._state = self._state, None
            if state is None:
                raise RuntimeError("a step before this one was not handed over")
            self._state, results = program(state)
            return results

        if self._threads is None:
            self._coming = concurrent.futures.Future()
            self._coming.set_result(run())
        else:
            self._coming = self._threads.submit(run)
        return self._coming
