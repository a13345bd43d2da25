"""Prefix cache: pages of earlier prompts, found again by what is in them.

    key of page k = blake2b(key of page k - 1, the 128 ids of page k);  before page 0: the identity

A key stands for a whole prefix under one set of weights, numerics and drafter. Requests share the
pages where they lie; nothing is copied on a hit.

Pages alone are not enough to go on from: a slot also remembers window rings. So some nodes have a
`state`, the rings at the end of their page, and a prefix is used up to the last page with one. From
there prefill gives the bits that it gives from the beginning (`Numerics.invariant`). States are
taken at a prompt's last whole pages, after every `every` pages, and where a prompt leaves pages
known from another one, which is where a third will leave them too; chunks end there. By choice
(`PrefixPolicy.restore`) rings are rebuilt where no state is: the last tokens of the prefix are
computed again without writing pages, and pages are then known after any chunk.
A request whose prefix another one is computing right now waits for it.

Tiers: a page lies on the device until its room is needed, then on the host up to `host_bytes`,
then in files (`prefix_files.py`), then nowhere. What copies from the device is handed in. Over
several devices a page can lie in several shards; a request of a shard without it gets a copy.
"""

import collections
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.runtime.pages import Pages
from deepinfer_jax.runtime.prefix_files import Files
from deepinfer_jax.runtime.prefix_types import Arrival, Counts, Known, Match, Node, PrefixPolicy

KEY_BYTES = 16


class PrefixCache:
    """identity: of weights, numerics and drafter. copy_pages: the content of pages, each a tree of
    arrays that may still be on their way. like: (content of a page, state) as shapes, for files.
    wait: `settle` waits for what is on its way, so that several processes see the same.
    """

    def __init__(
        self,
        policy: PrefixPolicy,
        identity: bytes,
        copy_pages: Callable[[Sequence[int]], list[Any]],
        like: Any,
        wait: bool = False,
    ):
        self.policy, self.counts = policy, Counts()
        if policy.restore == "replay":  # its pages are not those of exact rings
            identity += f"replay {policy.replay}".encode()
        self._identity, self._copy_pages, self._wait = identity, copy_pages, wait
        name = hashlib.blake2b(identity, digest_size=KEY_BYTES).hexdigest()
        folder = None if policy.folder is None else Path(policy.folder) / name
        self._files = Files(folder, policy.disk_bytes, like)
        self._nodes: dict[bytes, Node] = {}
        self._host: dict[bytes, Node] = {}  # with `saved`, longest unused first
        self._states: dict[bytes, Node] = {}  # with `state`, longest unused first
        self._coming: collections.deque[Node] = collections.deque()  # arrays not yet on the host
        self._known: dict[int, Known] = {}
        self._asked = collections.Counter[bytes]()  # by how many of those
        self._pending: dict[bytes, int] = {}  # states being computed, and by which request
        self._arrivals: dict[int, Arrival] = {}
        self._version = self._host_used = 0

    def use(self, pages: Pages) -> None:
        """Start with an empty pool: what lay on the device is gone, and every request with it."""
        self._pages = pages
        pages.evicted = self._evicted
        self._by_page: dict[int, Node] = {}
        self._known.clear()
        self._asked.clear()
        self._pending.clear()
        self._arrivals.clear()
        for node in list(self._nodes.values()):
            node.pages.clear()
            self._drop_if_nowhere(node)
        self._version += 1

    def keys(self, ids: Sequence[int]) -> list[bytes]:
        """Those of the whole pages of a prompt."""
        page, key, keys = self._pages.page, self._identity, []
        raw = np.asarray(ids, np.int32)
        for end in range(page, len(ids) + 1, page):
            key = hashlib.blake2b(key + raw[end - page : end].tobytes(), digest_size=KEY_BYTES)
            keys.append(key := key.digest())
        return keys

    def expected(self, keys: Sequence[bytes]) -> int:
        """Leading tokens of a prompt that are here or come with a request that has not ended."""
        depth = 0
        while depth < len(keys) and (self._is_here(keys[depth]) or self._asked[keys[depth]]):
            depth += 1
        return depth * self._pages.page

    def know(self, request: int, ids: Sequence[int], most: int) -> None:
        """A request of these prompt ids, which may skip up to `most` of them."""
        keys = self.keys(ids)
        self._known[request] = Known(keys, max(most, 0) // self._pages.page)
        self._asked.update(keys)
        self.counts.requests += 1
        self.counts.tokens += len(ids)

    def forget(self, request: int) -> None:
        """A request has ended."""
        self.left(request)
        known = self._known.pop(request, None)
        if known is not None:
            self._asked -= collections.Counter(known.keys)

    def found(self, request: int) -> int:
        """Tokens that a request need not compute now."""
        return self._look(request).start

    def local(self, request: int, shard: int) -> int:
        """Pages of what a request would find that lie in a shard."""
        depth = self._look(request).depth
        keys = self._known[request].keys[:depth] if depth else []
        return sum(key in self._nodes and shard in self._nodes[key].pages for key in keys)

    def waits(self, request: int) -> bool:
        """Whether somebody is computing more of a request's prefix than it would find now."""
        known = self._known.get(request)
        if known is None or not self._pending:
            return False
        depth = self._look(request).depth
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
        depth, start = self._match(known)
        while not all(self._at_hand(key) for key in known.keys[:depth]):
            depth, start = self._match(known)  # a damaged file: less is found
        nodes, shard = [self._nodes[key] for key in known.keys[:depth]], self._pages.shard(slot)
        held = [node.pages[shard] for node in nodes if shard in node.pages]
        self._pages.retain(held)  # making room for the others must not take these
        contents = self._contents([node for node in nodes if shard not in node.pages])
        loads = []
        for node in nodes:
            if shard in node.pages:
                self._pages.adopt(slot, [node.pages[shard]])
            else:
                size = (self._pages.held(slot) + 1) * self._pages.page
                if not self._pages.grow(slot, size):
                    raise RuntimeError(f"slot {slot}: no page for a found prefix")
                page = self._pages.row(slot)[-1]
                self._place(node, page)
                loads.append((page, contents[node.key]))
            self._touch(node)
        self._pages.release(held)
        if depth:
            shared = depth * self._pages.page
            state = nodes[-1].state if start == shared else None
            self._arrivals[request] = Arrival(start, shared, state, loads)
            self.counts.hits += 1
            self.counts.found += start
            self.counts.replayed += shared - start
            self._trim_states()  # files may have brought some
        self._plan_stops(request, known, depth)
        return start

    def arrival(self, request: int) -> Arrival | None:
        """What a request that has just entered starts from; None: from nothing."""
        return self._arrivals.pop(request, None)

    def stop(self, request: int, start: int, end: int) -> int:
        """Where a chunk [start, end) is to end, at a place whose state is wanted."""
        known = self._known.get(request)
        if known is None or not self.policy.states:
            return end
        size = self._pages.page
        return min((n * size for n in known.stops if start < n * size < end), default=end)

    def wanted(self, request: int, end: int) -> bool:
        """Whether the state after `end` tokens of a request is to be handed to `reached`; without
        states, whether `reached` is to be told."""
        known, (depth, rest) = self._known.get(request), divmod(end, self._pages.page)
        if known is None or not self.policy.states:
            return known is not None and any(n <= depth for n in known.stops)
        return not rest and depth in known.stops

    def reached(self, request: int, slot: int, end: int, state: Any) -> None:
        """A dispatched chunk ends at a wanted place; state: the slot's rings there, or None."""
        known, depth = self._known[request], end // self._pages.page
        shard = self._pages.shard(slot)
        for key, page in zip(known.keys[:depth], self._pages.row(slot), strict=False):
            node = self._nodes.setdefault(key, Node(key))
            if shard not in node.pages:
                self._place(node, page)
        for n in [n for n in known.stops if n <= depth]:
            known.stops.discard(n)
            self._pending.pop(known.keys[n - 1], None)
        node = self._nodes[known.keys[min(depth, len(known.keys)) - 1]]
        if node.state is None and state is not None:
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
        """Move what has arrived to host memory; called between steps."""
        while self._coming and (self._wait or _arrived(self._coming[0])):
            self._arrive(self._coming.popleft())
        while self._host_used > self.policy.host_bytes:
            node = next(iter(self._host.values()))
            if not node.pages:
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

    def _look(self, request: int) -> Match:
        known = self._known.get(request)
        if known is None:
            return Match()
        if known.seen[0] != self._version:
            known.seen = self._version, self._match(known)
        return known.seen[1]

    def _match(self, known: Known) -> Match:
        """Pages up to the last one with a state, of the pages that are there one after another; or
        up to the last one, if rebuilding its rings leaves less to compute."""
        best = here = 0
        for depth, key in enumerate(known.keys[: known.most], 1):
            if not self._is_here(key):
                break
            here, node = depth, self._nodes.get(key)
            has_state = node is not None and node.state is not None
            if has_state or self._files.has_state(key):
                best = depth
        page, again = self._pages.page, self.policy.replay
        if self.policy.restore == "replay" and here * page - again > best * page:
            return Match(here, here * page - again)
        return Match(best, best * page)

    def _contents(self, nodes: list[Node]) -> dict[bytes, Any]:
        """What is in pages: from the host, or else from some shard that has them."""
        away = [node for node in nodes if node.saved is None]
        copies = self._copy_pages([next(iter(node.pages.values())) for node in away])
        found = {node.key: node.saved for node in nodes}
        return found | {node.key: copy for node, copy in zip(away, copies, strict=True)}

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
        if not node.pages and node.saved is None:
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
        node.pages[self._pages.home(page)] = page
        self._by_page[page] = node
        self._pages.keep(page)

    def _touch(self, node: Node) -> None:
        for line in (self._host, self._states):
            if node.key in line:
                line[node.key] = line.pop(node.key)

    def _evicted(self, pages: list[int]) -> None:
        """The pool gives these pages to somebody else."""
        nodes = [self._by_page.pop(page) for page in pages]
        for page, node in zip(pages, nodes, strict=True):
            del node.pages[self._pages.home(page)]
        # Files are written from the host, however little stays there.
        if self.policy.host_bytes or self.policy.folder is not None:
            gone = zip(pages, nodes, strict=True)
            last = [(page, node) for page, node in gone if node.saved is None and not node.pages]
            contents = self._copy_pages([page for page, _ in last])
            for (_, node), content in zip(last, contents, strict=True):
                node.saved = content
                self._coming.append(node)
        for node in nodes:
            self._drop_if_nowhere(node)
        self._version += 1

    def _leave_host(self, node: Node) -> None:
        del self._host[node.key]
        self._host_used -= _bytes(node.saved)
        node.saved = None

    def _drop_if_nowhere(self, node: Node) -> None:
        if not node.pages and node.saved is None:
            self._nodes.pop(node.key, None)
            self._states.pop(node.key, None)
            self._version += 1


def ready(tree: Any) -> bool:
    """Whether every array that a device computes is there."""
    arrays: list[Any] = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return all(array.is_ready() for array in arrays)


def _arrived(node: Node) -> bool:
    return ready((node.saved, node.state))


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
