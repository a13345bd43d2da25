"""A few threads over many pieces of work, stopping together at the first failure."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from converters.source import CheckpointError

MOST = 8


def default() -> int:
    """Threads for copying and hashing on this machine."""
    return min(MOST, os.cpu_count() or 1)


def budget(memory: int, workers: int | None, copies: int, most: int) -> tuple[int, int]:
    """Threads, and bytes of a block of which each has `copies`, at most `most`, in `memory` bytes.

    workers: None, the default. Raises CheckpointError for less than a thread or 4 KiB.
    """
    workers = default() if workers is None else workers
    block = min(most, memory // (copies * max(1, workers)))
    if workers < 1 or block < 2**12:
        raise CheckpointError([f"memory = {memory} bytes for workers = {workers} is too little"])
    return workers, block


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
