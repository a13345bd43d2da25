"""What the host sends with a step: small numpy arrays, made anew for each one (they travel packed).

A step in flight may still read the arrays it was given (on a CPU they can be the device's own
memory), so nothing that was sent is written again: page tables are snapshots. The newest tokens and
lengths are not here, nor are requests' options; they stay on the device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.runtime.pages import Pages
from deepinfer_jax.runtime.plans import Chunk
from deepinfer_jax.runtime.requests import Sample
from deepinfer_jax.runtime.step_types import DecodeInput, PrefillInput, look_back, reach


@dataclasses.dataclass(frozen=True)
class Desk:
    """Makes the inputs of steps; per_slot: pages of a slot."""

    cfg: ModelConfig
    per_slot: int

    def prefill(
        self,
        groups: int,
        width: int,
        work: Sequence[tuple[int, Chunk, Sample]],
        pages: Pages,
    ) -> PrefillInput:
        """Chunks of prompts, each with its place among the groups."""
        blank, table = np.zeros(groups, np.int32), pages.snapshot()
        given = PrefillInput(
            token=np.zeros((groups, width), np.int32),
            slot=np.full(groups, -1, np.int32),
            start=blank.copy(),
            count=blank.copy(),
            last=np.zeros(groups, np.bool_),
            prompt=blank.copy(),
            begin=blank.copy(),
            own=blank.copy(),
            before=np.full((groups, look_back(self.cfg)), -1, np.int32),
            following=np.full((groups, width), -1, np.int32),
            pages=np.full((groups, self.per_slot), -1, np.int32),
            forced=np.full(groups, -1, np.int32),
            routes=self._routes((groups, width), [sample for *_, sample in work]),
        )
        for place, chunk, sample in work:
            tokens = sample.tokens
            end = chunk.start + chunk.count
            given.token[place, : chunk.count] = tokens[chunk.start : end]
            after = tokens[chunk.start + 1 : end + 1]
            given.following[place, : len(after)] = after
            given.slot[place], given.start[place] = chunk.slot, chunk.start
            given.count[place], given.last[place] = chunk.count, chunk.last
            given.prompt[place] = len(sample.prompt)
            given.begin[place], given.own[place] = sample.begin, sample.own
            earlier = tokens[max(chunk.start - given.before.shape[1], 0) : chunk.start]
            given.before[place, given.before.shape[1] - len(earlier) :] = earlier
            given.pages[place] = table[chunk.slot]
            if chunk.last:
                given.forced[place] = next(iter(sample.forced_from(len(tokens))), -1)
            if given.routes is not None:
                _fill(given.routes[place], sample.routes, chunk.start)
        return given

    def decode(
        self,
        groups: int,
        size: int,
        block: int,
        work: Sequence[tuple[int, Any, Sample]],
        pages: Pages,
        temperature: np.ndarray,
    ) -> DecodeInput:
        """Turns of running requests, each with its place among the groups, in a bucket of `size`
        rows, up to 1 + block each."""
        far = reach(block)
        places = np.array([place for place, *_ in work], np.int32)
        slots = np.array([turn.slot for _, turn, _ in work], np.int32)
        turns = np.bincount(places * pages.shards // groups, minlength=pages.shards)
        given = DecodeInput(
            slot=np.full(groups, -1, np.int32),
            pages=np.full((groups, self.per_slot), -1, np.int32),
            room=np.zeros(groups, np.int32),
            budget=np.repeat(size // pages.shards - turns, groups // pages.shards).astype(np.int32),
            temperature=np.tile(temperature, (groups, 1)),
            known=np.zeros(groups, np.int32),
            forced=np.full((groups, far), -1, np.int32),
            routes=self._routes((groups, far), [sample for *_, sample in work]),
        )
        given.slot[places], given.pages[places] = slots, pages.table[slots]
        given.room[places] = block
        for place, _, sample in work:
            if sample.matcher is not None:
                given.room[place] = 0
            if sample.forced or sample.routes is not None:
                known = len(sample.prompt) + max(len(sample.output.token_ids) - 1, 0)
                given.known[place] = known
                forced = sample.forced_from(known)[:far]
                given.forced[place, : len(forced)] = forced
                if given.routes is not None:
                    _fill(given.routes[place], sample.routes, known)
        return given

    def _routes(self, lead: tuple[int, int], samples: Sequence[Sample]) -> np.ndarray | None:
        if all(sample.routes is None for sample in samples):
            return None
        return np.full(
            (*lead, self.cfg.num_hidden_layers, self.cfg.num_experts_per_tok), -1, np.int32
        )


def decoder_rows(cfg: ModelConfig, width: int, work: Sequence[tuple[int, Chunk, Sample]]) -> int:
    """Most rows of a chunk that the decoder half sees under bounded replay.

    The last `replay_keep` of a prompt; of a request computed again also its output, for which the
    whole width is taken.
    """
    most = 0
    for _, chunk, sample in work:
        floor = len(sample.prompt) - cfg.replay_keep
        most = max(most, chunk.start + chunk.count - max(chunk.start, floor))
    return 0 if most <= 0 else min(cfg.replay_keep, width) if most <= cfg.replay_keep else width


def _fill(window: np.ndarray, routes: np.ndarray | None, start: int) -> None:
    if routes is not None:
        found = routes[start : start + len(window)]
        window[: len(found)] = found
