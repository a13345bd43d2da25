"""What a conversion tells its user: progress, one-line failures, and how to go on.

A bar with bytes/s and time left on a terminal, plain lines elsewhere.
"""

import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from converters.source import LossWarning

LINE_SECONDS = 10.0
RESUMES = "interrupted; run the same command again to resume"


class Progress:
    """Counts bytes towards `total`; `done` bytes were there before (a resumed run).

    Use as a context manager, from any thread. stream: where to write (stderr by default). quiet:
    count only.
    """

    def __init__(
        self,
        label: str,
        total: int,
        done: int = 0,
        stream: Any = None,
        quiet: bool = False,
    ):
        self.label, self.total, self.done = label, total, done
        self._first, self._start = done, time.monotonic()
        self._stream, self._quiet = stream or sys.stderr, quiet
        self._printed = self._start
        self._bar = self._task = None
        self._lock = threading.Lock()

    def __enter__(self) -> "Progress":
        self._start = self._printed = time.monotonic()
        if not self._quiet and self._stream.isatty():
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task(self.label, total=self.total, completed=self.done)
            self._bar.start()
        elif not self._quiet and self._first:
            self._line("resuming")
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self._quiet:
            self._line("finished" if kind is None else "stopped")

    def advance(self, count: int, item: str = "") -> None:
        """`count` more bytes are done; `item` says what they belong to."""
        with self._lock:
            self.done += count
            if self._bar is not None and self._task is not None:
                text = f"{self.label} {item}"
                self._bar.update(self._task, completed=self.done, description=text)
            elif not self._quiet and time.monotonic() - self._printed >= LINE_SECONDS:
                self._line(item)

    def _line(self, item: str) -> None:
        now = time.monotonic()
        self._printed = now
        rate = (self.done - self._first) / max(now - self._start, 1e-9)
        left = f", {(self.total - self.done) / rate / 60:.1f} min left" if rate else ""
        unit, name = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        self._stream.write(
            f"{self.label}: {self.done / unit:.1f} of {self.total / unit:.1f} {name}, "
            f"{rate / 1e6:.0f} MB/s{left} ({item})\n"
        )
        self._stream.flush()


def reported(work: Callable[[], object], interrupted: str = "interrupted") -> int:
    """Run a command and print what it returns; its exit code, with warnings and failures as lines.

    0: done. 2: `CheckpointError`, one line a finding on stderr, or another ValueError or OSError,
    which says what could not be read or written. 130: `interrupted` from the keyboard.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", LossWarning)
        warnings.showwarning = _one_line
        try:
            print(work())
        except (ValueError, OSError) as error:
            for line in str(error).splitlines():
                print(line, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(interrupted, file=sys.stderr)
            return 130
    return 0


def _one_line(message: Warning | str, *_: object) -> None:
    print(f"warning: {message}", file=sys.stderr)
