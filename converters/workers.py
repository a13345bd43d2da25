"""A few threads over many pieces of work, stopping together at the first failure."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

MOST = 8


def default() -> int:
    """Threads for copying and hashing on this machine."""
    return min(MOST, os.cpu_count() or 1)


class Stopped(Exception):
    """Raised inside a worker once another one has failed, or the user has interrupted."""


class Workers:
    """`run` a function over items in a pool; the work calls `check` often, so that it can stop."""

    def __init__(self, count: int):
        self.count = count
        self._stop = threading.Event()

    def check(self) -> None:
        """Raise `Stopped` if the work is to end."""
        if self._stop.is_set():
            raise Stopped

    def run(self, work: Callable[[Any], None], items: Iterable[Any]) -> None:
        """Call `work` on every item, in order of their start; the first exception comes back."""
        with ThreadPoolExecutor(self.count, "convert") as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                for future in as_completed(futures):
                    future.result()
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
