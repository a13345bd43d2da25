"""Disaggregation inside one program: prompts on one group of devices, tokens on another.

Two loops work side by side, each with its own programs, pages and slots. A sample enters the prompt
loop; when its first token has been read and the decode loop has a slot free, its state (rings,
sampling tables, place in the grammar, drafts, pages) is copied from device to device and it goes on
there as a request that was preempted comes back: the same `take` and `put`, so the same bits. While
the decode loop is full, samples stay where they are and the prompt loop fills up behind them.

The decode loop sets the pace: results of the prompt loop are read when they are there, so a long
prompt delays no token of another request. A request that the decode loop must evict, with no room
for it on the host, is computed again by the decode loop.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from deepinfer_jax.layout import Layout
from deepinfer_jax.model.transformer import Weights
from deepinfer_jax.runtime.experts import Counts
from deepinfer_jax.runtime.loop import Loop
from deepinfer_jax.runtime.requests import Sample


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that prompts are computed on (`LLM(prefill=Group(...))`).

    layout: of the weights there, None for one device; devices: as of `LLM`, None: those that the
    layout gets by itself, which may be the decode devices too; slots: prompts in work or waiting to
    be taken over; pages: of 128 tokens in all (None: enough for every slot's whole context).
    """

    layout: Layout | None = None
    devices: Sequence[Any] | None = None
    slots: int = 8
    pages: int | None = None

    def __post_init__(self):
        if isinstance(self.slots, bool) or not isinstance(self.slots, int) or self.slots < 1:
            raise ValueError(f"prefill: slots = {self.slots!r}; expected a positive integer")


class Split:
    """A prompt loop and a decode loop with the face of one (`loop.Loop`). moved: samples handed
    over."""

    def __init__(self, prompts: Loop, decode: Loop):
        self.prompts, self.decode, self.moved = prompts, decode, 0

    def __len__(self) -> int:
        """Samples that have not ended."""
        return len(self.prompts) + len(self.decode)

    def __getattr__(self, name: str) -> Any:
        """What is not said here is the decode loop's: policy, context, programs, options."""
        return getattr(self.decode, name)

    @property
    def prefix(self) -> Any:
        """The prefix cache, which is the prompt loop's."""
        return self.prompts.prefix

    @property
    def dispatched(self) -> collections.Counter[tuple[str, int, int]]:
        """Steps of both loops."""
        return self.prompts.dispatched + self.decode.dispatched

    @property
    def capture(self) -> tuple[str, ...]:
        """See `loop.Loop.capture`."""
        return self.decode.capture

    @capture.setter
    def capture(self, names: tuple[str, ...]) -> None:
        self.prompts.capture = self.decode.capture = names

    @property
    def counts(self) -> Counts | None:
        """See `loop.Loop.counts`."""
        return self.decode.counts

    @counts.setter
    def counts(self, counts: Counts | None) -> None:
        self.prompts.counts = self.decode.counts = counts

    def add(self, sample: Sample) -> None:
        """See `loop.Loop.add`."""
        self.prompts.add(sample)

    def abort(self, sample: Sample) -> None:
        """See `loop.Loop.abort`."""
        self.prompts.abort(sample)
        self.decode.abort(sample)

    def turn(self) -> None:
        """A round of both loops; waits for the decode loop if that has work."""
        busy = len(self.decode) > 0
        self.prompts.turn(wait=not busy)
        while self.prompts.ready and (self.prompts.ready[0].finished or self.decode.accepts):
            sample = self.prompts.ready.popleft()
            if sample.finished:
                continue  # aborted meanwhile
            handed = self.prompts.give(sample)
            saved = self.decode.programs.spread(handed.saved)
            self.decode.receive(handed._replace(saved=saved))
            self.moved += 1
        if len(self.decode):
            self.decode.turn()

    def each(self) -> tuple[Loop, ...]:
        """The prompt loop, then the decode loop."""
        return self.prompts, self.decode

    def drain(self) -> None:
        """See `loop.Loop.drain`."""
        self.prompts.drain()
        self.decode.drain()

    def reset(self) -> None:
        """See `loop.Loop.reset`."""
        self.prompts.reset()
        self.decode.reset()

    def swap(self, weights: Weights, identity: bytes, prompts: Weights) -> None:
        """See `loop.Loop.swap`; prompts: the same weights for the prompt loop."""
        self.prompts.swap(prompts, identity)
        self.decode.swap(weights, identity)
