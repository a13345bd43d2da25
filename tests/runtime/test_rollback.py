"""Rolling back is keeping a smaller length: the cache against a list of what was accepted.

First without a model: every row that is fed stores a number of its own, unique to the place and to
the attempt. A list a sequence holds the numbers of the accepted rows. Whatever prompts, draft
widths and accepted counts come, each row must read from rings, open groups, n-gram classes and
pages exactly the list and the drafts before it, and never a rejected row. Then a model whose every
block is rejected, against the same tokens in one call.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import cache as caches
from deepinfer_jax.model import rows as row_lists
from deepinfer_jax.model import transformer
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.compile import jit
from deepinfer_jax.model.head import head_logits
from deepinfer_jax.model.setup import Setup
from tests.lab import small_model as sharded_model
from tests.runtime import small_model
from tests.runtime.small_model import BLOCK, WINDOW

BLOCKS = (BLOCK, 8, 16)  # two beyond the least size of the open groups' and of the classes' rings
CFG = ModelConfig.from_hf(small_model.CONFIG)
SLOTS, CHUNK, LONGEST = 2, 40, 300
PER_SLOT = -(-LONGEST // caches.PAGE)
NGRAM = CFG.engram_max_ngram_size - 1
RATIOS = (2, 1)  # of the two KV sources


def _rows(token, start, count, pages, dense):
    slot = jnp.arange(SLOTS, dtype=jnp.int32)
    given = {"start": start, "count": count, "slot": slot, "pages": pages}
    if dense:
        return row_lists.rectangle(token, **given)
    return row_lists.flat(token, size=SLOTS * token.shape[1], **given)


def _back(rows, steps):
    position = rows.position[:, None] - steps
    return jnp.where((position >= 0) & rows.valid[:, None], position, -1)


def _read(source, index):
    return jnp.where(index >= 0, source.reshape(source.shape[0], -1)[jnp.maximum(index, 0), 0], -1)


@functools.partial(jax.jit, static_argnames="dense")
def _feed(cache, tags, start, count, pages, dense):
    """Writes a call's rows; what each row reads back, as rectangles, and the cache afterwards.

    window: positions p - WINDOW + 1 .. p; open: p - 1; classes: p - NGRAM .. p - 1; entries of both
    sources: all that the sequence can have, -1 beyond what p completes.
    """
    rows = _rows(tags, start, count, pages, dense)
    tag = rows.token
    real = tag.astype(jnp.float32)[:, None]
    found, after = {}, {}
    looks = {
        "window": (cache.window[0], WINDOW, 0, jnp.broadcast_to(real, (rows.size, CFG.head_dim))),
        "open": (cache.open[0], 1, 1, jnp.broadcast_to(real[:, None], (rows.size, 2, 32))),
        "classes": (cache.classes, NGRAM, 1, tag),
    }
    for name, (ring, many, first, new) in looks.items():
        steps = jnp.arange(first, first + many, dtype=jnp.int32)[None, ::-1]
        lookback = first + many - 1
        source, index, after[name] = caches.recall(ring, new, rows, _back(rows, steps), lookback)
        found[name] = _read(source, index)
    stores = []
    for store, ratio in zip(cache.entries, RATIOS, strict=True):
        new = jnp.broadcast_to(real, (rows.size, CFG.head_dim))
        stores.append(caches.write_entries(store, new, rows, ratio))
        entry = jnp.arange(LONGEST // ratio, dtype=jnp.int32)[None, :]
        visible = (rows.position[:, None] + 1) // ratio
        entry = jnp.where((entry < visible) & rows.valid[:, None], entry, -1)
        index = caches.entry_index(rows.pages, rows.group, entry, caches.PAGE // ratio)
        found[f"entries of ratio {ratio}"] = _read(caches.flat_pool(stores[-1]), index)
    cache = dataclasses.replace(
        cache,
        window=(after["window"], *cache.window[1:]),
        open=(after["open"], *cache.open[1:]),
        classes=after["classes"],
        entries=tuple(stores),
    )
    return {name: row_lists.to_rectangle(rows, leaf) for name, leaf in found.items()}, cache


@functools.partial(jax.jit, static_argnames="dense")
def _remember(cache, tags, start, count, kept, pages, dense):
    """The accepted rows go into the draft ring, as in a step."""
    rows = _rows(tags, start, count, pages, dense)
    standing = rows.valid & (rows.position < (start + kept)[rows.group])
    context = dataclasses.replace(rows, valid=standing, count=kept)
    new = jnp.broadcast_to(rows.token.astype(jnp.float32)[:, None], (rows.size, CFG.head_dim))
    return dataclasses.replace(cache, draft=(caches.write_ring(cache.draft[0], new, context),))


def _expected(name, history, position):
    if name == "window":
        where = range(position - WINDOW + 1, position + 1)
    elif name == "open":
        where = range(position - 1, position)
    elif name == "classes":
        where = range(position - NGRAM, position)
    else:
        ratio = int(name[-1])
        ends = range(ratio - 1, ratio * (LONGEST // ratio), ratio)
        return [history[end] if end <= position else -1 for end in ends]
    return [history[at] if at >= 0 else -1 for at in where]


def _steps(block):
    """Drafts of each slot, and how many of them stand."""
    slot = st.tuples(st.integers(0, block), st.integers(0, block))
    return st.lists(st.lists(slot, min_size=SLOTS, max_size=SLOTS), min_size=1, max_size=25)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("ragged", [False, True])
@settings(deadline=None, max_examples=40)
@given(
    prompts=st.lists(st.integers(1, 180), min_size=SLOTS, max_size=SLOTS),
    data=st.data(),
    order=st.permutations(range(SLOTS * PER_SLOT)),
)
def test_every_row_reads_what_was_accepted(ragged, block, prompts, data, order):
    """ragged: a slot may also sit a step out; block: drafts of a step at most."""
    numerics = small_model.numerics()
    cfg = dataclasses.replace(CFG, dspark_block_size=block)
    cache = caches.empty(cfg, numerics, slots=SLOTS, pages=SLOTS * PER_SLOT)
    pages = np.array(order, np.int32).reshape(SLOTS, PER_SLOT)
    numbers, history = itertools.count(1), [[] for _ in range(SLOTS)]

    def call(width, counts, accepted, dense):
        nonlocal cache
        tags = np.array([[next(numbers) for _ in range(width)] for _ in range(SLOTS)], np.int32)
        start = np.array([len(one) for one in history], np.int32)
        count, kept = np.array(counts, np.int32), np.array(accepted, np.int32)
        found, cache = _feed(cache, tags, start, count, pages, dense)
        cache = _remember(cache, tags, start, count, kept, pages, dense)
        for name, values in jax.device_get(found).items():
            for slot in range(SLOTS):
                seen = history[slot] + tags[slot].tolist()
                for place in range(counts[slot]):
                    wanted = _expected(name, seen, int(start[slot]) + place)
                    assert values[slot, place].tolist() == wanted, (name, slot, place)
        for slot in range(SLOTS):
            history[slot] += tags[slot, : accepted[slot]].tolist()

    while any(len(one) < length for one, length in zip(history, prompts, strict=True)):
        counts = [min(CHUNK, n - len(one)) for one, n in zip(history, prompts, strict=True)]
        call(CHUNK, counts, counts, dense=True)
    for step in data.draw(_steps(block)):
        if max(map(len, history)) + 1 + block > LONGEST:
            break
        counts = [1 + drafts if drafts or not ragged else 0 for drafts, _ in step]
        stood = [min(n, 1 + stands) for n, (_, stands) in zip(counts, step, strict=True)]
        call(1 + block, counts, stood, dense=False)
        ring = np.asarray(cache.draft[0])[..., 0]
        for slot, one in enumerate(history):
            recent = range(max(len(one) - WINDOW, 0), len(one))
            assert [ring[slot, at % ring.shape[1]] for at in recent] == [one[at] for at in recent]


@pytest.mark.parametrize("block", [8, pytest.param(14, marks=pytest.mark.slow)])
def test_a_model_goes_on_from_rejected_blocks(block):
    """Each call has one right token and a block of wrong ones; logits are those of forward."""
    cfg = sharded_model.config(dspark_block_size=block)
    setup = Setup(cfg, numerics=small_model.numerics())
    weights, many = sharded_model.weights(cfg), 40
    ids, _ = sharded_model.tokens(1, many)
    wrong = np.random.default_rng(1).integers(3, 500, (many, 1 + block), dtype=np.int32)

    @jit
    def forward(weights, tokens):
        return transformer.forward(setup, weights, tokens, jnp.full(1, many, jnp.int32))[0]

    @jit
    def step(weights, cache, tokens, start):
        count, slot = jnp.full(1, 1 + block, jnp.int32), jnp.zeros(1, jnp.int32)
        pages = jnp.zeros((1, 1), jnp.int32)
        rows = row_lists.rectangle(tokens, start=start, count=count, slot=slot, pages=pages)
        out = transformer.trunk(setup, weights, rows, cache, Capture())
        x = transformer.collapse(setup, weights, out.hidden, Capture())
        return head_logits(setup, x[:1], weights.norm, weights.head), out.cache

    wanted = np.asarray(forward(weights, ids))[0]
    cache = caches.empty(cfg, setup.numerics, slots=1, pages=1)
    for place in range(many):
        wrong[place, 0] = ids[0, place]
        start = np.full(1, place, np.int32)
        logits, cache = step(weights, cache, wrong[place : place + 1], start)
        assert np.abs(np.asarray(logits)[0] - wanted[place]).max() < 5e-5, place
