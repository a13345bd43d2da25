"""Pages of the compressed cache: who holds which, and the table the device reads.

A page is 128 token positions of every global cache at once (compressed KV and index keys of all
sources). A sequence in slot s keeps its k-th 128 positions in page ``table[s, k]``; -1 means none,
and the device drops what it would write there. The table is data, not shape: int32
[slots, pages a slot], sent with a step whenever ``version`` has moved.

Pages are reference counted. A slot holds one reference to each page in its row; whoever keeps pages
beyond a request (a prefix cache, a fork) holds its own with ``retain``. A page is free exactly when
nobody holds it. Freeing is safe while a step that still writes the page is in flight, because the
device runs steps in order and a new owner reads only what it wrote itself.
"""

from collections.abc import Iterable, Sequence

import numpy as np

PAGE = 128  # token positions


class Pages:
    """A pool of ``total`` pages for ``slots`` sequences of at most ``per_slot`` pages each."""

    def __init__(self, total: int, slots: int, per_slot: int, page: int = PAGE):
        if min(total, slots, per_slot, page) < 1:
            raise ValueError(
                f"pages: total {total}, slots {slots}, per slot {per_slot} and size {page} "
                "must all be at least 1"
            )
        self.total, self.slots, self.per_slot, self.page = total, slots, per_slot, page
        self.table = np.full((slots, per_slot), -1, np.int32)
        self.version = 0
        self._held = [0] * slots
        self._references = [0] * total
        self._free = list(range(total - 1, -1, -1))  # a stack: the lowest page comes out first

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.total - len(self._free)

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
        if wanted > self.per_slot:
            raise ValueError(
                f"slot {slot}: {tokens} tokens need {wanted} pages, a slot has {self.per_slot}"
            )
        if wanted - held > len(self._free):
            return False
        if wanted > held:
            taken = [self._free.pop() for _ in range(wanted - held)]
            for page in taken:
                self._references[page] = 1
            self._append(slot, taken)
        return True

    def adopt(self, slot: int, pages: Sequence[int]) -> None:
        """Append pages that somebody else holds (a shared prefix), with a reference to each."""
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
        self.release(pages)

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page. Raises ValueError for a free page."""
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is free: only a held page can be shared")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page; the last one frees it. Raises ValueError if it is free."""
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def snapshot(self) -> np.ndarray:
        """A copy of the table for one step: later changes must not reach a step in flight."""
        return self.table.copy()

    def _append(self, slot: int, pages: Sequence[int]) -> None:
        held = self._held[slot]
        self.table[slot, held : held + len(pages)] = pages
        self._held[slot] = held + len(pages)
        self.version += 1
