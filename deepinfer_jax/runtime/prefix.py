"""Prefix cache: pages of earlier prompts, found again by what is in them.

    key of page k = blake2b(key of page k - 1, the 128 ids of page k);  before page 0: the identity

A key stands for a whole prefix under one set of weights, numerics and drafter. Requests share the
pages where they lie; nothing is copied on a hit.

Pages alone are not enough to go on from: a slot also remembers window rings. So some nodes have a
`state`, the rings at the end of their page, and a prefix is used up to the last page with one. From
there prefill gives the bits that it gives from the beginning (`Numerics.invariant`). States are
taken at a prompt's last whole pages, after every `every` pages, and where a prompt leaves pages
known from another one, which is where a third will leave them too; chunks end there.
A request whose prefix another one is computing right now waits for it.

Tiers: a page lies on the device until its room is needed, then on the host up to `host_bytes`,
then in files (`prefix_files.py`), then nowhere. What copies from the device is handed in.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from deepinfer_jax.runtime.pages import Pages
from deepinfer_jax.runtime.prefix_files import Files

KEY_BYTES = 16


@dataclasses.dataclass(frozen=True)
class PrefixPolicy:
    """every: pages from one state to the next. states: most states kept (1.4 MB each at released
    size). host_bytes: for pages that left the device. folder: for those that left the host, or
    None; disk_bytes: their room."""

    every: int = 8
    states: int = 256
    host_bytes: int = 4 * 2**30
    folder: Path | None = None
    disk_bytes: int = 64 * 2**30

    def __post_init__(self):
        if self.every < 1 or self.states < 1 or min(self.host_bytes, self.disk_bytes) < 0:
            raise ValueError(f"prefix cache: every and states at least 1, bytes at least 0: {self}")


class Arrival(NamedTuple):
    """What a request starts from: tokens not to be computed, rings, (page, content) to write."""

    tokens: int
    state: Any
    loads: list[tuple[int, Any]]


@dataclasses.dataclass
class Counts:
    """Requests that looked, requests that found something, tokens asked for and found, damaged
    files met."""

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    found: int = 0
    damaged: int = 0


@dataclasses.dataclass(eq=False)
class Node:
    """A page by key. page: its number on the device; saved: its content on the host; state: rings
    at its end."""

    key: bytes
    page: int | None = None
    saved: Any = None
    state: Any = None


@dataclasses.dataclass(eq=False)
class Known:
    """A request's prefix. most: pages that it may start after; stops: pages whose states it is to
    leave behind; seen: (version, depth) of the last look."""

    keys: list[bytes]
    most: int
    stops: set[int] = dataclasses.field(default_factory=set)
    seen: tuple[int, int] = (-1, 0)


class PrefixCache:
    """identity: of weights, numerics and drafter. copy_pages: the content of pages, each a tree of
    arrays that may still be on their way. like: (content of a page, state) as shapes, for files.
    """

    def __init__(
        self,
        policy: PrefixPolicy,
        identity: bytes,
        copy_pages: Callable[[Sequence[int]], list[Any]],
        like: Any,
    ):
        self.policy, self.counts = policy, Counts()
        self._identity, self._copy_pages = identity, copy_pages
        name = hashlib.blake2b(identity, digest_size=KEY_BYTES).hexdigest()
        folder = None if policy.folder is None else policy.folder / name
        self._files = Files(folder, policy.disk_bytes, like)
        self._nodes: dict[bytes, Node] = {}
        self._host: dict[bytes, Node] = {}  # with `saved`, longest unused first
        self._states: dict[bytes, Node] = {}  # with `state`, longest unused first
        self._coming: collections.deque[Node] = collections.deque()  # arrays not yet on the host
        self._known: dict[int, Known] = {}
        self._pending: dict[bytes, int] = {}  # states being computed, and by which request
        self._arrivals: dict[int, Arrival] = {}
        self._version = self._host_used = 0

    def use(self, pages: Pages) -> None:
        """Start with an empty pool: what lay on the device is gone, and every request with it."""
        self._pages = pages
        pages.evicted = self._evicted
        self._by_page: dict[int, Node] = {}
        self._known.clear()
        self._pending.clear()
        self._arrivals.clear()
        for node in list(self._nodes.values()):
            node.page = None
            self._drop_if_nowhere(node)
        self._version += 1

    def know(self, request: int, ids: Sequence[int], most: int) -> None:
        """A request of these prompt ids, which may skip up to `most` of them."""
        page, key, keys = self._pages.page, self._identity, []
        raw = np.asarray(ids, np.int32)
        for end in range(page, len(ids) + 1, page):
            key = hashlib.blake2b(key + raw[end - page : end].tobytes(), digest_size=KEY_BYTES)
            keys.append(key := key.digest())
        self._known[request] = Known(keys, max(most, 0) // page)
        self.counts.requests += 1
        self.counts.tokens += len(ids)

    def forget(self, request: int) -> None:
        """A request has ended."""
        self.left(request)
        self._known.pop(request, None)

    def found(self, request: int) -> int:
        """Tokens that a request could skip now."""
        known = self._known.get(request)
        if known is None:
            return 0
        if known.seen[0] != self._version:
            known.seen = self._version, self._match(known)
        return known.seen[1] * self._pages.page

    def waits(self, request: int) -> bool:
        """Whether somebody is computing more of a request's prefix than it would find now."""
        known = self._known.get(request)
        if known is None or not self._pending:
            return False
        depth = self.found(request) // self._pages.page
        return any(
            self._pending.get(key, request) != request for key in known.keys[depth : known.most]
        )

    def attach(self, request: int, slot: int) -> int:
        """A request enters an empty slot: its row begins with what is found; tokens to skip.

        The pool must have room for all of the prompt.
        """
        known = self._known.get(request)
        if known is None:
            return 0
        depth = self._match(known)
        while not all(self._at_hand(key) for key in known.keys[:depth]):
            depth = self._match(known)  # a damaged file: less is found
        nodes = [self._nodes[key] for key in known.keys[:depth]]
        held = [node.page for node in nodes if node.page is not None]
        self._pages.retain(held)  # making room for the others must not take these
        loads = []
        for node in nodes:
            if node.page is not None:
                self._pages.adopt(slot, [node.page])
            else:
                size = (self._pages.held(slot) + 1) * self._pages.page
                if not self._pages.grow(slot, size):
                    raise RuntimeError(f"slot {slot}: no page for a found prefix")
                self._place(node, self._pages.row(slot)[-1])
                loads.append((node.page, node.saved))
            self._touch(node)
        self._pages.release(held)
        tokens = depth * self._pages.page
        if depth:
            self._arrivals[request] = Arrival(tokens, nodes[-1].state, loads)
            self.counts.hits += 1
            self.counts.found += tokens
            self._trim_states()  # files may have brought some
        self._plan_stops(request, known, depth)
        return tokens

    def arrival(self, request: int) -> Arrival | None:
        """What a request that has just entered starts from; None: from nothing."""
        return self._arrivals.pop(request, None)

    def stop(self, request: int, start: int, end: int) -> int:
        """Where a chunk [start, end) is to end, at a place whose state is wanted."""
        known = self._known.get(request)
        size = self._pages.page
        stops = [] if known is None else [n * size for n in known.stops if start < n * size < end]
        return min(stops, default=end)

    def wanted(self, request: int, end: int) -> bool:
        """Whether the state after `end` tokens of a request is to be handed to `reached`."""
        known, (depth, rest) = self._known.get(request), divmod(end, self._pages.page)
        return known is not None and not rest and depth in known.stops

    def reached(self, request: int, slot: int, end: int, state: Any) -> None:
        """A dispatched chunk ends at a wanted place; state: the slot's rings there."""
        known, depth = self._known[request], end // self._pages.page
        for key, page in zip(known.keys[:depth], self._pages.row(slot), strict=False):
            node = self._nodes.setdefault(key, Node(key))
            if node.page is None:
                self._place(node, page)
        node = self._nodes[known.keys[depth - 1]]
        known.stops.discard(depth)
        self._pending.pop(node.key, None)
        if node.state is None:
            node.state = state
            self._states[node.key] = node
            self._coming.append(node)
            self._trim_states()
        self._version += 1

    def left(self, request: int) -> None:
        """A request left its slot: what it was computing does not come."""
        known = self._known.get(request)
        if known is not None:
            known.stops.clear()
        for key in [key for key, owner in self._pending.items() if owner == request]:
            del self._pending[key]
        self._arrivals.pop(request, None)

    def settle(self) -> None:
        """Move what has arrived to host memory; called between steps, waits for nothing."""
        while self._coming and _ready((self._coming[0].saved, self._coming[0].state)):
            self._arrive(self._coming.popleft())
        while self._host_used > self.policy.host_bytes:
            node = next(iter(self._host.values()))
            if node.page is None:
                self._files.write(node.key, node.saved, node.state)
            self._leave_host(node)
            self._drop_if_nowhere(node)

    def save(self) -> None:
        """Writes all that is kept to files; called when no request is in a slot."""
        for shard in range(self._pages.shards):
            self._pages.evict(shard)
        while self._coming:
            self._arrive(self._coming.popleft())
        for node in self._host.values():
            self._files.write(node.key, node.saved, node.state)

    def _arrive(self, node: Node) -> None:
        node.state = jax.tree.map(np.asarray, node.state)
        if node.saved is not None and node.key not in self._host:
            node.saved = jax.tree.map(np.asarray, node.saved)
            self._host[node.key] = node
            self._host_used += _bytes(node.saved)

    def _match(self, known: Known) -> int:
        """Pages up to the last one with a state, of the pages that are there one after another."""
        best = 0
        for depth, key in enumerate(known.keys[: known.most], 1):
            if not self._is_here(key):
                break
            node = self._nodes.get(key)
            has_state = node is not None and node.state is not None
            if has_state or self._files.has_state(key):
                best = depth
        return best

    def _is_here(self, key: bytes) -> bool:
        return key in self._nodes or key in self._files

    def _at_hand(self, key: bytes) -> bool:
        """Brings a page's content and state to the host if only a file has them."""
        node = self._nodes.get(key)
        has_state = node is not None and node.state is not None
        if node is not None and (has_state or not self._files.has_state(key)):
            return True
        read = self._files.read(key)
        if read is None:
            self.counts.damaged += 1
            self._version += 1
            return False
        node = self._nodes.setdefault(key, Node(key))
        saved, state = read
        if node.page is None and node.saved is None:
            node.saved = saved
            self._host[key] = node
            self._host_used += _bytes(saved)
        if node.state is None and state is not None:
            node.state = state
            self._states[key] = node
        return True

    def _plan_stops(self, request: int, known: Known, depth: int) -> None:
        pages = len(known.keys)
        shared = next((n for n, key in enumerate(known.keys) if not self._is_here(key)), pages)
        wanted = {pages, min(known.most, pages), shared}
        wanted |= set(range(self.policy.every, pages + 1, self.policy.every))
        known.stops = {n for n in wanted if n > depth}
        for n in known.stops:
            self._pending.setdefault(known.keys[n - 1], request)

    def _trim_states(self) -> None:
        while len(self._states) > self.policy.states:
            oldest = next(iter(self._states.values()))
            oldest.state = None
            del self._states[oldest.key]
            self._version += 1

    def _place(self, node: Node, page: int) -> None:
        node.page = page
        self._by_page[page] = node
        self._pages.keep(page)

    def _touch(self, node: Node) -> None:
        for line in (self._host, self._states):
            if node.key in line:
                line[node.key] = line.pop(node.key)

    def _evicted(self, pages: list[int]) -> None:
        """The pool gives these pages to somebody else."""
        nodes = [self._by_page.pop(page) for page in pages]
        if self.policy.host_bytes:
            going = [node for node in nodes if node.saved is None]
            places = [node.page for node in going if node.page is not None]
            contents = self._copy_pages(places) if places else []
            for node, content in zip(going, contents, strict=True):
                node.saved = content
                self._coming.append(node)
        for node in nodes:
            node.page = None
            self._drop_if_nowhere(node)
        self._version += 1

    def _leave_host(self, node: Node) -> None:
        del self._host[node.key]
        self._host_used -= _bytes(node.saved)
        node.saved = None

    def _drop_if_nowhere(self, node: Node) -> None:
        if node.page is None and node.saved is None:
            self._nodes.pop(node.key, None)
            self._states.pop(node.key, None)
            self._version += 1


def _ready(tree: Any) -> bool:
    arrays: list[Any] = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return all(array.is_ready() for array in arrays)


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
