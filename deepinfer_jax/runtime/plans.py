"""What the scheduler is told and what it answers: shapes, chunks, turns, moves, steps, outcomes."""

import dataclasses
import enum
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Policy:
    """The shapes that are compiled, and how they are used.

    slots: requests at once. decode_rows: row counts of the decode programs. prefill: (sequences,
    width) of the prefill programs. block: most draft rows a slot in a decode step.
    prefill_burst, decode_burst: steps of one kind in a row while the other kind has work.
    host_pages: room for preempted requests, in pages; state_pages: what a slot's own state costs.
    decodes: False where requests are taken elsewhere when their prompt is done.
    """

    slots: int
    decode_rows: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    block: int = 0
    prefill_burst: int = 4
    decode_burst: int = 4
    host_pages: int = 0
    state_pages: int = 1
    decodes: bool = True

    def __post_init__(self):
        if self.slots < 1 or self.block < 0 or min(self.prefill_burst, self.decode_burst) < 1:
            raise ValueError(
                f"policy: slots and bursts must be at least 1, block at least 0: {self}"
            )
        if not self.decode_rows or max(self.decode_rows) < self.slots:
            raise ValueError(
                f"policy: decode_rows {self.decode_rows} must reach one row for each of the "
                f"{self.slots} slots"
            )
        if not self.prefill or any(min(shape) < 1 for shape in self.prefill):
            raise ValueError(f"policy: prefill needs (sequences, width) shapes, got {self.prefill}")

    def width(self, tokens: int) -> int:
        """Width of the next chunk of a prompt with ``tokens`` left."""
        widths = sorted({width for _, width in self.prefill})
        return next((width for width in widths if width >= tokens), widths[-1])

    def sequences(self, width: int) -> list[int]:
        """Rectangle heights compiled for a width, ascending."""
        return sorted(count for count, other in self.prefill if other == width)


class Chunk(NamedTuple):
    """Prompt tokens [start, start + count) of a request; the last chunk samples a token."""

    request: int
    slot: int
    start: int
    count: int
    last: bool


class Turn(NamedTuple):
    """One decode turn of a request: its last token and the draft rows it is granted."""

    request: int
    slot: int


class Act(enum.Enum):
    """What a move does, before the step's own work and in the order given."""

    ADMIT = "admit"  # a fresh slot: install the request's options, forget what was there
    OFFLOAD = "offload"  # copy the pages and the slot's state to the host
    RESTORE = "restore"  # copy them back, to another slot and other pages
    EVICT = "evict"  # forget the slot; the request will be computed again


class Move(NamedTuple):
    act: Act
    request: int
    slot: int
    pages: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """One step to dispatch. shape: (sequences, width) of a prefill, (rows,) of a decode."""

    number: int
    moves: tuple[Move, ...]
    work: tuple[Chunk, ...] | tuple[Turn, ...]
    shape: tuple[int, ...]

    @property
    def prefill(self) -> bool:
        return len(self.shape) == 2


class Outcome(NamedTuple):
    """What a step did for a request: tokens it added, and whether the request has ended."""

    tokens: int
    finished: bool = False
