"""Pages of the compressed cache: who holds which, and the table the device reads.

A page is 128 token positions of every global cache at once (compressed KV and index keys of all
sources). A sequence in slot s keeps its k-th 128 positions in page ``table[s, k]``; -1 means none,
and the device drops what it would write there. The table is data, not shape: int32
[slots, pages a slot], sent with a step whenever ``version`` has moved.

Pages are reference counted. A slot holds one reference to each page in its row; requests with a
common prefix share its pages. A page that nobody holds is free. Freeing is safe while a step that
still writes the page is in flight, because the device runs steps in order and a new owner reads
only what it wrote itself.

A prefix cache marks pages with ``keep``: nobody needs to hold them, but what is in them is worth
something. They count as free and are given out last, the one longest unheld first; ``evicted`` is
called with each before that, while its content is still there.

Over several devices slots and pages are cut into ``shards`` equal runs, and a slot's pages come
from the run of its own shard. The places of a step are cut likewise (``places``).
"""

import collections
from collections.abc import Callable, Iterable, Sequence

import numpy as np

PAGE = 128  # token positions


class Pages:
    """A pool of ``total`` pages for ``slots`` sequences of at most ``per_slot`` pages each."""

    def __init__(self, total: int, slots: int, per_slot: int, page: int = PAGE, shards: int = 1):
        if min(total, slots, per_slot, page, shards) < 1:
            raise ValueError(
                f"pages: total {total}, slots {slots}, per slot {per_slot}, size {page} and "
                f"shards {shards} must all be at least 1"
            )
        if total % shards or slots % shards:
            raise ValueError(f"pages: {total} pages, {slots} slots do not divide by {shards}")
        self.total, self.slots, self.per_slot, self.page = total, slots, per_slot, page
        self.shards = shards
        self.table = np.full((slots, per_slot), -1, np.int32)
        self.version = 0
        self._held = [0] * slots
        self._references = [0] * total
        part = total // shards  # stacks: the lowest page of a shard comes out first
        self._free = [list(range((i + 1) * part - 1, i * part - 1, -1)) for i in range(shards)]
        self._kept: set[int] = set()
        # Kept pages that nobody holds, longest unheld first.
        self._spare: list[dict[int, None]] = [{} for _ in range(shards)]
        self.evicted: Callable[[list[int]], None] = lambda pages: None

    @property
    def free(self) -> int:
        """Pages that nobody holds, kept ones among them."""
        return sum(map(len, self._free)) + sum(map(len, self._spare))

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.total - self.free

    def shard(self, slot: int) -> int:
        """Which run a slot belongs to."""
        return slot * self.shards // self.slots

    def home(self, page: int) -> int:
        """Which run a page belongs to."""
        return page * self.shards // self.total

    def room(self, slot: int) -> int:
        """Pages that nobody holds and that the slot could have."""
        shard = self.shard(slot)
        return len(self._free[shard]) + len(self._spare[shard])

    def needs(self, slots: Iterable[int]) -> int:
        """Least places of a step that works on these slots, every shard having equally many."""
        counts = collections.Counter(map(self.shard, slots))
        return self.shards * max(counts.values(), default=0)

    def places(self, slots: Iterable[int], count: int) -> list[int]:
        """Where each slot's group stands among ``count`` places: in its shard's run, in order."""
        taken = [0] * self.shards
        found = []
        for shard in map(self.shard, slots):
            found.append(shard * (count // self.shards) + taken[shard])
            taken[shard] += 1
        return found

    def needed(self, tokens: int) -> int:
        """Pages that hold ``tokens`` positions."""
        return -(-tokens // self.page)

    def held(self, slot: int) -> int:
        """Pages in the slot's row."""
        return self._held[slot]

    def row(self, slot: int) -> list[int]:
        """The slot's pages in order of position."""
        return self.table[slot, : self._held[slot]].tolist()

    def references(self, page: int) -> int:
        """Holders of a page; 0: free."""
        return self._references[page]

    def grow(self, slot: int, tokens: int) -> bool:
        """Extend the slot's row to hold ``tokens`` positions, all or nothing; False: pool short.

        Raises ValueError where the row itself is too short for so many.
        """
        wanted, held = self.needed(tokens), self._held[slot]
        if wanted <= held:
            return True
        if wanted > self.per_slot:
            raise ValueError(
                f"slot {slot}: {tokens} tokens need {wanted} pages, a slot has {self.per_slot}"
            )
        shard = self.shard(slot)
        if wanted - held > self.room(slot):
            return False
        self.evict(shard, wanted - held - len(self._free[shard]))
        taken = [self._free[shard].pop() for _ in range(wanted - held)]
        for page in taken:
            self._references[page] = 1
        self._append(slot, taken)
        return True

    def adopt(self, slot: int, pages: Sequence[int]) -> None:
        """Append pages that somebody else holds or that are kept (a shared prefix), with a
        reference to each."""
        if self._held[slot] + len(pages) > self.per_slot:
            raise ValueError(f"slot {slot}: {len(pages)} more pages exceed {self.per_slot}")
        self.retain(pages)
        self._append(slot, pages)

    def clear(self, slot: int) -> None:
        """Empty the slot's row and drop its references."""
        pages = self.row(slot)
        self.table[slot, : len(pages)] = -1
        self._held[slot] = 0
        self.version += 1
        self.release(reversed(pages))  # of kept ones the end of a prefix goes before its beginning

    def keep(self, page: int) -> None:
        """Mark a held page as worth keeping. Raises ValueError for a page that nobody holds."""
        if self._references[page] == 0:
            raise ValueError(f"page {page} is free: only a held page can be kept")
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Take the mark back."""
        self._kept.discard(page)
        shard = self.home(page)
        if page in self._spare[shard]:
            del self._spare[shard][page]
            self._free[shard].append(page)

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page. Raises ValueError for a free page that is not kept."""
        for page in pages:
            spare = self._spare[self.home(page)]
            if self._references[page] == 0 and page not in spare:
                raise ValueError(f"page {page} is free: only a held or kept page can be shared")
            spare.pop(page, None)
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page; the last one frees it. Raises ValueError if it is free."""
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._references[page] -= 1
            if self._references[page] == 0:
                shard = self.home(page)
                if page in self._kept:
                    self._spare[shard][page] = None
                else:
                    self._free[shard].append(page)

    def evict(self, shard: int, count: int | None = None) -> None:
        """Free the `count` kept pages of a shard that are longest unheld (None: all of them)."""
        pages = list(self._spare[shard])[: None if count is None else max(count, 0)]
        if pages:
            self.evicted(pages)
        for page in pages:
            self.forget(page)

    def snapshot(self) -> np.ndarray:
        """A copy of the table for one step: later changes must not reach a step in flight."""
        return self.table.copy()

    def _append(self, slot: int, pages: Sequence[int]) -> None:
        held = self._held[slot]
        self.table[slot, held : held + len(pages)] = pages
        self._held[slot] = held + len(pages)
        self.version += 1
