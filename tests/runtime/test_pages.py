"""Pages are conserved and never given twice, under any sequence of operations."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deepinfer_jax.runtime.pages import Pages

SLOTS, TOTAL, PER_SLOT, PAGE = 3, 9, 4, 8


class PoolMachine(RuleBasedStateMachine):
    """Random grow, clear, share and cache traffic against a list of holders."""

    def __init__(self):
        super().__init__()
        self.pages = Pages(TOTAL, SLOTS, PER_SLOT, PAGE)
        self.kept: list[list[int]] = []
        self.marked: set[int] = set()
        self.pages.evicted = self.evicted

    def evicted(self, pages):
        """Only marked pages that nobody holds, while their mark is still there."""
        assert pages and set(pages) <= self.marked
        assert not any(self.pages.references(page) for page in pages)
        self.marked -= set(pages)

    @rule(slot=st.integers(0, SLOTS - 1))
    def mark(self, slot):
        for page in self.pages.row(slot)[:2]:
            self.pages.keep(page)
            self.marked.add(page)

    @rule(slot=st.integers(0, SLOTS - 1))
    def find_again(self, slot):
        """A page that only its mark keeps is shared with a slot."""
        unheld = [page for page in sorted(self.marked) if not self.pages.references(page)]
        if unheld and self.pages.held(slot) < PER_SLOT:
            self.pages.adopt(slot, unheld[:1])

    @rule()
    def unmark(self):
        if self.marked:
            self.pages.forget(self.marked.pop())

    @rule(slot=st.integers(0, SLOTS - 1), tokens=st.integers(0, PER_SLOT * PAGE))
    def grow(self, slot, tokens):
        before, free = self.pages.row(slot), self.pages.free
        needed = max(-(-tokens // PAGE) - len(before), 0)
        grown = self.pages.grow(slot, tokens)
        assert grown == (needed <= free)
        assert self.pages.row(slot)[: len(before)] == before
        assert self.pages.held(slot) == len(before) + (needed if grown else 0)

    @rule(slot=st.integers(0, SLOTS - 1))
    def clear(self, slot):
        self.pages.clear(slot)
        assert self.pages.row(slot) == []

    @rule(slot=st.integers(0, SLOTS - 1))
    def keep(self, slot):
        self.kept.append(self.pages.row(slot))
        self.pages.retain(self.kept[-1])

    @rule(slot=st.integers(0, SLOTS - 1))
    def adopt(self, slot):
        if self.kept and len(self.kept[0]) + self.pages.held(slot) <= PER_SLOT:
            self.pages.adopt(slot, self.kept[0])

    @rule()
    def drop(self):
        if self.kept:
            self.pages.release(self.kept.pop())

    @invariant()
    def conserved(self):
        holders = Counter(page for kept in self.kept for page in kept)
        for slot in range(SLOTS):
            holders.update(self.pages.row(slot))
            held = self.pages.held(slot)
            assert (self.pages.table[slot, :held] >= 0).all()
            assert (self.pages.table[slot, held:] == -1).all()
        assert all(self.pages.references(page) == holders[page] for page in range(TOTAL))
        assert self.pages.used == len(holders) and self.pages.free == TOTAL - len(holders)
        unheld = set(range(TOTAL)) - set(holders)
        assert set(self.pages._spare[0]) == self.marked & unheld
        assert sorted(self.pages._free[0]) == sorted(unheld - self.marked)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_version_moves_with_the_table_and_snapshots_do_not():
    pages = Pages(4, 2, 4)
    first = pages.snapshot()
    assert pages.grow(0, 129) and pages.row(0) == [0, 1]
    version = pages.version
    assert pages.grow(0, 200) and pages.version == version
    pages.clear(0)
    assert pages.version > version
    np.testing.assert_array_equal(first, -1)


def test_misuse_is_named():
    pages = Pages(4, 2, 3)
    with pytest.raises(ValueError, match="slot 1: 385 tokens need 4 pages, a slot has 3"):
        pages.grow(1, 385)
    with pytest.raises(ValueError, match="page 2 is free"):
        pages.retain([2])
    with pytest.raises(ValueError, match="page 2 is free already"):
        pages.release([2])
    assert pages.grow(0, 384)
    with pytest.raises(ValueError, match="exceed 3"):
        pages.adopt(0, [0])
    with pytest.raises(ValueError, match="at least 1"):
        Pages(0, 1, 1)
