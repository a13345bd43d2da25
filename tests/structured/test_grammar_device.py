"""The device functions against a plain simulation of automaton, stack and remaining tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import structured
from deepinfer_jax.structured.pool import CHUNK, WINDOW
from deepinfer_jax.structured.pushdown import DONE, START
from tests.structured.grammar_walk import EOS, LEVELS, WIDTH, advance, compiled_shapes, mask
from tests.structured.simulation import Simulation

JSON = """
root ::= value
value ::= "{" (pair ("," pair)*)? "}" | "[" (value ("," value)*)? "]" | string | number | "null"
pair ::= string ":" value
string ::= "\\"" [^"\\\\]* "\\""
number ::= "-"? [0-9]+
"""
XML = 'root ::= "<" [a-c]+ ">" ([^<>]+ | root)* "</" [a-c]+ ">"'
SEXP = 'root ::= [a-z]+ | "(" root (" " root)* ")"'
GRAMMARS = {"json": JSON, "xml": XML, "s-expression": SEXP}


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_equal_a_simulation(name, vocabulary, walker):
    grammar = walker.compile({"ebnf": GRAMMARS[name]})
    assert grammar.report.tier == 2
    simulation = Simulation(GRAMMARS[name], vocabulary, LEVELS)
    row = walker.load(grammar)
    rng = np.random.default_rng(1)
    for _ in range(4):
        state, config = walker.state(grammar, row, 1), (START, ())
        for _ in range(25):
            allowed = mask(walker.pool, state)[0]
            np.testing.assert_array_equal(allowed, simulation.mask(config))
            choices = np.nonzero(allowed)[0]
            opening = [t for t in choices if set(vocabulary.texts[t]) & set(b"{[(<")]
            pick = opening if opening and rng.random() < 0.5 else choices
            token = int(rng.choice([t for t in pick if t != EOS] or [EOS]))
            state = advance(walker.pool, state, token)
            config = simulation.token(config, token)
            if config[0] == DONE:
                break
            assert int(state.depth[0]) == len(config[1])
            assert tuple(np.asarray(state.stack)[0, : len(config[1])].tolist()) == config[1]
    walker.manager.release(row)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_full_stack_still_ends(name, walker):
    """With two levels every text completes; nothing is opened that would not fit."""
    grammar = walker.compile({"ebnf": GRAMMARS[name]})
    row = walker.load(grammar)
    one = structured.start(row, levels=2)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (16, *x.shape)), one)
    key = jax.random.key(0)
    for step in range(64):
        allowed = mask(walker.pool, state, 64 - step)
        assert allowed.any(axis=1).all()
        noise = jax.random.gumbel(jax.random.fold_in(key, step), allowed.shape)
        token = jnp.argmax(jnp.where(allowed, noise, -jnp.inf), axis=1)
        state = advance(walker.pool, state, token)
        assert int(state.depth.max()) <= 2
    assert (np.asarray(state.grammar) == structured.FREE).all()
    walker.manager.release(row)


def test_need_is_exact_without_a_stack(walker, vocabulary):
    """EOS included, ``min_tokens`` is the shortest tokenisation of the shortest text."""
    grammar = walker.compile({"choice": ["nullnull", "falsefalsefalse"]})
    assert vocabulary.texts.index(b"null") and grammar.report.min_tokens == 3
    assert {t for t, _ in walker.sample(grammar, 3)} == {b"nullnull"}
    assert {t for t, _ in walker.sample(grammar, 20)} == {b"nullnull", b"falsefalsefalse"}


def test_no_added_token_and_no_tail(walker, vocabulary):
    grammar = walker.compile({"regex": "(?s).*"})
    row = walker.load(grammar)
    allowed = mask(walker.pool, walker.state(grammar, row, 1))[0]
    texts = np.array([bool(text) for text in vocabulary.texts])
    invalid = np.array(
        [any(b in (0xC0, 0xC1, *range(0xF5, 256)) for b in t) for t in vocabulary.texts]
    )
    starts_inside = np.array([bool(t) and 0x80 <= t[0] < 0xC0 for t in vocabulary.texts])
    expected = texts & ~invalid & ~starts_inside
    expected[EOS] = True
    np.testing.assert_array_equal(allowed, expected)
    walker.manager.release(row)


def test_a_character_split_across_tokens(walker, vocabulary):
    grammar = walker.compile({"choice": ["中文!"]})
    first, second = vocabulary.texts.index(b"\xe4\xb8"), vocabulary.texts.index(b"\xad\xe6")
    row = walker.load(grammar)
    state = walker.state(grammar, row, 1)
    for token in (first, second):
        assert mask(walker.pool, state)[0, token]
        state = advance(walker.pool, state, token)
    allowed = np.nonzero(mask(walker.pool, state)[0])[0]
    assert [vocabulary.texts[t] for t in allowed] == [b"\x96"]
    walker.manager.release(row)


def test_trigger(walker):
    """Free until the ids have come in a row, overlaps counted; then from the grammar's start."""
    grammar = walker.compile({"choice": ["yes"], "trigger": [7, 7, 9]})
    row = walker.load(grammar)
    state = walker.state(grammar, row, 1)
    for token in (5, 7, 9, 7, 7, 7, 9):
        assert mask(walker.pool, state).all()
        state = advance(walker.pool, state, token)
    assert int(state.trigger[0]) == -1
    allowed = mask(walker.pool, state)[0]
    texts = {walker.vocabulary.texts[t] for t in np.nonzero(allowed)[0]}
    assert texts == {b"y", b"yes"}
    walker.manager.release(row)


def test_mixed_rows_drafts_and_rollback(walker):
    """Leading dimensions are free; a state kept from before a draft continues as if it were new."""
    grammars = [walker.compile(s) for s in ({"regex": "[0-9]{4}"}, {"ebnf": SEXP})]
    rows = [walker.load(g) for g in grammars]
    states = [structured.start(r, levels=LEVELS) for r in (*rows, structured.FREE)]
    state = jax.tree.map(lambda *x: jnp.stack(x), *states)
    draft = jnp.array([[60, 60], [60, 60], [60, 60]], jnp.int32)
    kept = [state]
    for j in range(2):
        kept.append(advance(walker.pool, kept[-1], draft[:, j]))
    block = structured.walk(walker.pool, state, draft)
    back = structured.take(block, jnp.array([0, 1, 2], jnp.int32))
    for i in range(3):
        same = jax.tree.map(lambda x, y, i=i: bool((x[i] == y[i]).all()), back, kept[i])
        assert all(jax.tree.leaves(same))
    remaining = jnp.broadcast_to(50 - jnp.arange(3, dtype=jnp.int32)[None, :], (3, 3))
    together = mask(walker.pool, block, remaining)
    assert together.shape == (3, 3, WIDTH)
    for j in range(3):
        alone = mask(walker.pool, kept[j], remaining[:, j])
        np.testing.assert_array_equal(together[:, j], alone)
    assert together[2].all() and not together[0, 0].all()
    for row in rows:
        walker.manager.release(row)


def test_a_new_grammar_compiles_nothing(walker):
    first = walker.compile({"regex": "a+"})
    row = walker.load(first)
    mask(walker.pool, walker.state(first, row, 1))
    walker.manager.release(row)
    before = compiled_shapes()
    second = walker.compile({"ebnf": JSON})
    row = walker.load(second)
    mask(walker.pool, walker.state(second, row, 1))
    walker.manager.release(row)
    assert compiled_shapes() == before


class TestPool:
    def test_shares_keeps_and_evicts(self, walker):
        manager = structured.PoolManager(WIDTH, grammars=2, cells=4 * CHUNK)
        pool = manager.empty()
        a, b, c = (walker.compile({"choice": [w]}) for w in "abc")
        pool, row_a = manager.acquire(pool, a)
        pool, again = manager.acquire(pool, a)
        pool, row_b = manager.acquire(pool, b)
        assert again == row_a != row_b
        with pytest.raises(structured.PoolFullError, match="2 of 2 grammars in use"):
            manager.acquire(pool, c)
        manager.release(row_b)
        pool, row_c = manager.acquire(pool, c)
        assert row_c == row_b
        for row, text in ((row_a, b"a"), (row_c, b"c")):
            state = structured.start(row, levels=LEVELS)
            allowed = mask(pool, state)
            assert {walker.vocabulary.texts[t] for t in np.nonzero(allowed)[0]} == {text}

    def test_grammars_lie_side_by_side_and_leave_each_other_alone(self, walker):
        """Small ones in a chunk, one of several windows between them, the last up to the end."""
        small = [walker.compile({"choice": [word]}) for word in ("a", "b", "c", "d")]
        large = walker.compile({"json_schema": {"type": "string", "maxLength": 300}})
        assert len(large.block.cells) > WINDOW and len(small[0].block.cells) < CHUNK
        chunks = -(-len(large.block.cells) // CHUNK)
        order = [small[0], large, small[1], small[2]]
        manager = structured.PoolManager(WIDTH, grammars=5, cells=(3 + chunks) * CHUNK)
        pool, rows = manager.empty(), []
        for grammar in order:
            pool, row = manager.acquire(pool, grammar)
            rows.append(row)
        with pytest.raises(structured.PoolFullError, match="1 free chunks"):
            manager.acquire(pool, small[3])
        manager.release(rows[0])
        pool, rows[0] = manager.acquire(pool, small[3])
        arena, at = np.asarray(pool.arena), 0
        for grammar in (small[3], *order[1:]):
            cells = grammar.block.cells
            np.testing.assert_array_equal(arena[at : at + len(cells)], cells)
            at += -(-len(cells) // CHUNK) * CHUNK
        allowed = mask(pool, structured.start(rows[1], levels=LEVELS))
        quote = walker.vocabulary.texts.index(b'"')
        assert allowed[quote] and not allowed[walker.vocabulary.texts.index(b"a")]

    def test_refuses_what_never_fits(self, walker):
        manager = structured.PoolManager(WIDTH, grammars=1, cells=CHUNK)
        large = walker.compile({"json_schema": {"type": "string", "maxLength": 300}})
        with pytest.raises(structured.GrammarError, match="cells"):
            manager.acquire(manager.empty(), large)
        with pytest.raises(structured.GrammarError, match="512 logits"):
            other = structured.PoolManager(WIDTH + 1)
            other.acquire(other.empty(), large)
