"""What the prefix cache (`prefix.py`) is told and keeps: policy, counts, pages, requests."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

RESTORE = ("state", "replay")


@dataclasses.dataclass(frozen=True)
class PrefixPolicy:
    """every: pages from one state to the next. states: most states kept (1.4 MB each at released
    size). host_bytes: for pages that left the device. folder: for those that left the host, or
    None; disk_bytes: their room.

    restore: "state" uses a prefix up to a page with a state, and gives the bits of computing it;
    "replay" may also compute the last `replay` tokens of any found page again for their rings only
    (at least the model's window, a multiple of 8). What those tokens see is cut off before them, so
    results differ a little (docs/prefix_cache.md); with states = 0 no state is ever taken.
    """

    every: int = 8
    states: int = 256
    host_bytes: int = 4 * 2**30
    folder: str | Path | None = None
    disk_bytes: int = 64 * 2**30
    restore: str = "state"
    replay: int = 128

    def of_replica(self, number: int) -> "PrefixPolicy":
        """For one of several engines that write at once: each has files of its own."""
        if self.folder is None or number == 0:
            return self
        return dataclasses.replace(self, folder=Path(self.folder) / f"replica-{number}")

    def __post_init__(self):
        if self.restore not in RESTORE:
            raise ValueError(
                f"prefix cache: restore = {self.restore!r}; expected {' or '.join(RESTORE)}"
            )
        least = int(self.restore == "state")
        if self.every < 1 or self.states < least or min(self.host_bytes, self.disk_bytes) < 0:
            raise ValueError(
                f"prefix cache: every and states at least 1 (states 0 with restore = 'replay'), "
                f"bytes at least 0: {self}"
            )
        if self.replay < 8 or self.replay % 8:
            raise ValueError(f"prefix cache: replay = {self.replay}; expected a multiple of 8")


class Arrival(NamedTuple):
    """What a request starts from: tokens not to be computed; tokens in shared pages, more of them
    if rings are to be rebuilt (then state is None); rings; (page, content) to write."""

    start: int
    shared: int
    state: Any
    loads: list[tuple[int, Any]]


@dataclasses.dataclass
class Counts:
    """Requests that looked, requests that found something, tokens asked for, found and not
    computed, found but computed again for their rings; damaged files met."""

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    found: int = 0
    replayed: int = 0
    damaged: int = 0


@dataclasses.dataclass(eq=False)
class Node:
    """A page by key. pages: its numbers on the device, by shard; saved: its content on the host;
    state: rings at its end."""

    key: bytes
    pages: dict[int, int] = dataclasses.field(default_factory=dict)
    saved: Any = None
    state: Any = None


class Match(NamedTuple):
    """Pages found one after another that a request can start from, and the first token that it then
    computes: after them, or before if their rings are rebuilt."""

    depth: int = 0
    start: int = 0


@dataclasses.dataclass(eq=False)
class Known:
    """A request's prefix. most: pages that it may start after; stops: pages after which it leaves
    something behind; seen: version and result of the last look."""

    keys: list[bytes]
    most: int
    stops: set[int] = dataclasses.field(default_factory=set)
    seen: tuple[int, Match] = (-1, Match())
