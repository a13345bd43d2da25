"""The front door: a request's ``structured`` dict -> a compiled `Grammar`.

    regex          python syntax, the whole text matches          tier 1
    choice         one of some texts                              tier 1
    json_schema    see `schema`                                   tier 1, or 2 if it recurses
    json: True     any JSON object                                tier 2
    ebnf           see `ebnf`                                     tier 1, or 2 if it recurses

Tier 3 (`host`) takes what the first two decline with a `TierError`; the report says why. Results
are cached by content, vocabulary and limits in a `GrammarCache` that the caller owns. `Compiler`
compiles on worker threads, so that a request enters the schedule when its grammar is ready and a
bad one fails alone.
"""

import collections
import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from deepinfer_jax.structured import ebnf, host, network, regex
from deepinfer_jax.structured.dfa import determinise, embed
from deepinfer_jax.structured.errors import Budget, GrammarError, Limits, TierError, reason_of
from deepinfer_jax.structured.grammar import Grammar, Report, pack
from deepinfer_jax.structured.nfa import ENTRY, Choice, Nfa, Text, Tree
from deepinfer_jax.structured.pushdown import DONE, START, pushdown
from deepinfer_jax.structured.ranges import utf8_paths
from deepinfer_jax.structured.schema import emit
from deepinfer_jax.structured.schema.document import check_values
from deepinfer_jax.structured.stack import StackMachine, Steering, merge, prune, steer
from deepinfer_jax.structured.tokens import (
    NEVER,
    FiniteMachine,
    classify,
    distinct,
    share_rows,
    shortest,
)
from deepinfer_jax.structured.vocabulary import Vocabulary

KINDS = ("regex", "json_schema", "ebnf", "choice", "json")


@dataclasses.dataclass(frozen=True)
class _Spec:
    kind: str
    value: Any
    trigger: tuple[int, ...]
    lenient: bool

    @staticmethod
    def read(spec: Mapping[str, Any], width: int, limits: Limits) -> "_Spec":
        kinds = [k for k in KINDS if k in spec]
        unknown = sorted(set(spec) - {*KINDS, "trigger", "lenient"})
        if len(kinds) != 1 or unknown:
            raise GrammarError(
                f"structured takes exactly one of {', '.join(KINDS)}, and trigger, lenient; "
                f"got {sorted(spec)}"
            )
        value = spec[kinds[0]]
        _check_value(kinds[0], value)
        check_values(value)
        if len(json.dumps(value)) > limits.spec_bytes:
            raise GrammarError(f"structured {kinds[0]} is longer than {limits.spec_bytes} bytes")
        trigger = spec.get("trigger", ())
        good = isinstance(trigger, Sequence) and all(
            isinstance(t, int) and not isinstance(t, bool) and 0 <= t < width for t in trigger
        )
        if not good or ("trigger" in spec and not trigger):
            raise GrammarError(
                f"trigger must be a list of token ids below {width}, got {trigger!r}"
            )
        return _Spec(kinds[0], value, tuple(trigger), bool(spec.get("lenient", False)))

    def key(self, vocabulary: Vocabulary, limits: Limits) -> str:
        content = [self.kind, self.value, self.trigger, self.lenient, dataclasses.astuple(limits)]
        text = json.dumps(content) + vocabulary.key
        return hashlib.sha256(text.encode()).hexdigest()


def _check_value(kind: str, value: Any) -> None:
    expected = {
        "regex": (isinstance(value, str), "a string"),
        "ebnf": (isinstance(value, str), "a string"),
        "json_schema": (isinstance(value, str | dict | bool), "a schema or its JSON text"),
        "json": (value is True, "True"),
        "choice": (
            isinstance(value, list | tuple)
            and len(value) > 0
            and all(isinstance(v, str) for v in value),
            "a non-empty list of strings",
        ),
    }
    good, what = expected[kind]
    if not good:
        raise GrammarError(f"structured {kind} must be {what}, got {value!r}")


def _flat(tree_: Tree | None, dfa: Any, budget: Budget) -> Nfa:
    nfa = Nfa(utf8_paths, budget)
    start = nfa.node()
    end = embed(nfa, start, dfa) if tree_ is None else nfa.tree(tree_, start)
    nfa.rules[ENTRY] = (start, end)
    return nfa


def _sources(
    spec: _Spec, budget: Budget
) -> tuple[list[Callable[[], tuple[Nfa, tuple[str, ...]]]], Callable[[], str]]:
    """Graphs to try in turn, each with warnings, and the text for the host tier."""
    value = spec.value
    if spec.kind == "regex":
        inner = regex.tree(value)
        return (
            [lambda: (_flat(None, regex.language(value, budget), budget), ())],
            lambda: host.grammar_text("lark", ebnf.to_lark({"root": inner})),
        )
    if spec.kind == "choice":
        words: Tree = Choice(tuple(Text(text) for text in dict.fromkeys(value)))
        return (
            [lambda: (_flat(words, None, budget), ())],
            lambda: host.grammar_text("lark", ebnf.to_lark({"root": words})),
        )
    if spec.kind == "ebnf":
        rules = ebnf.parse(value)
        return (
            [
                lambda: (network.build(rules, budget), ()),
                lambda: (network.build(rules, budget, calls_everywhere=True), ()),
            ],
            lambda: host.grammar_text("lark", ebnf.to_lark(rules)),
        )
    schema = {"type": "object"} if spec.kind == "json" else value

    def graph(everywhere: bool) -> tuple[Nfa, tuple[str, ...]]:
        return emit.network(schema, budget, lenient=spec.lenient, calls_everywhere=everywhere)

    return (
        [lambda: graph(False), lambda: graph(True)],
        lambda: host.grammar_text("json_schema", emit.closed_text(schema)),
    )


def _tables(
    nfa: Nfa, vocabulary: Vocabulary, spec: _Spec, budget: Budget
) -> tuple[Report, Any, Any]:
    """Report without time, block and token classes of a graph, in the lowest tier that takes it."""
    if any(nfa.calls):
        machine = pushdown(nfa)
        columns, classes = classify(vocabulary, walker := StackMachine(machine, budget), budget)
        columns, edges = merge(walker, columns)
        steering = steer(machine, columns, edges)
        columns, edges = prune(columns, edges, steering)
        columns, classes = distinct(columns, classes)
        rows = share_rows(columns)
        levels = int(steering.height[START])
        budget.check("stack levels", levels, budget.limits.stack)
        tier, reason = 2, "rules call themselves"
    else:
        dfa = determinise(nfa, *nfa.rules[ENTRY], 256)
        if dfa.empty():
            raise GrammarError("no text at all matches the grammar")
        columns, classes = classify(vocabulary, FiniteMachine(dfa), budget)
        rows = share_rows(columns)
        need = shortest(rows)
        if need[START] == NEVER:
            raise GrammarError("no text of this vocabulary completes the grammar")
        none = np.zeros(0, np.int64)
        steering, edges = Steering(need, np.zeros_like(need), none, none, none), None
        levels, tier, reason = 0, 1, "finite"
    block = pack(rows, steering, edges, spec.trigger)
    budget.check("cells of tables", len(block.cells), budget.limits.table)
    report = Report(
        tier=tier,
        reason=reason,
        states=len(rows.pattern),
        classes=len(columns),
        patterns=len(rows.patterns),
        edges=len(edges.target) if edges else 0,
        exits=int((edges.target < 0).sum()) if edges else 0,
        bytes=block.cells.nbytes + classes.nbytes,
        min_tokens=int(steering.need[START]),
        levels=levels,
    )
    return report, block, classes


def _host(text: str, reason: str, vocabulary: Vocabulary) -> tuple[Report, Any, Any]:
    """Tier 3: on the device an automaton of one state, whose classes are written each step."""
    columns = np.zeros((3, 3), np.int32)
    columns[1:, START] = START, DONE
    rows = share_rows(columns)
    need = np.array([NEVER, 0, 0])
    none = np.zeros(0, np.int64)
    block = pack(rows, Steering(need, np.zeros_like(need), none, none, none), None, ())
    classes = host.token_classes(vocabulary)
    size = block.cells.nbytes + classes.nbytes
    return (
        Report(tier=3, reason=reason, states=3, classes=3, patterns=2, bytes=size),
        block,
        classes,
    )


def _compile(spec: _Spec, key: str, vocabulary: Vocabulary, limits: Limits) -> Grammar:
    begin, budget = time.monotonic(), Budget(limits)
    warnings: tuple[str, ...] = ()
    host_text: str | None = None
    graphs, fallback = _sources(spec, budget)
    reasons = []
    for graph in graphs:
        try:
            nfa, warnings = graph()
            report, block, classes = _tables(nfa, vocabulary, spec, budget)
            if reasons:
                report = dataclasses.replace(report, reason=f"with more calls: {reasons[0]}")
            break
        except TierError as error:
            reasons.append(str(error))
    else:
        reason = reasons[0] if len(set(reasons)) == 1 else "; ".join(reasons)
        try:
            host_text = fallback()
        except GrammarError as error:
            raise GrammarError(f"{error} (device tiers: {reason})") from None
        report, block, classes = _host(host_text, reason, vocabulary)
    report = dataclasses.replace(report, seconds=time.monotonic() - begin, warnings=warnings)
    return Grammar(key, report, block, classes, spec.trigger, host_text)


class GrammarCache:
    """Grammars by content, the least recently used dropped past ``max_bytes`` of tables.

    Threads that ask for one grammar at the same time compile it once. Errors are not kept.
    """

    def __init__(self, max_bytes: int = 128 << 20):
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[str, Future[Grammar]] = collections.OrderedDict()

    def get(self, key: str, make: Callable[[], Grammar]) -> Grammar:
        """The grammar of a key, made by ``make`` unless it is there or being made."""
        with self._lock:
            future = self._entries.get(key)
            mine = future is None
            if future is None:
                future = self._entries[key] = Future()
            self._entries.move_to_end(key)
        if not mine:
            return future.result()
        try:
            future.set_result(make())
        except BaseException as error:
            with self._lock:
                del self._entries[key]
            future.set_exception(error)
            raise
        self._shrink()
        return future.result()

    def _shrink(self) -> None:
        with self._lock:
            done = {k: f.result().report.bytes for k, f in self._entries.items() if f.done()}
            total = sum(done.values())
            for key, size in list(done.items())[:-1]:
                if total > self.max_bytes:
                    del self._entries[key]
                    total -= size


def compile(
    spec: Mapping[str, Any],
    vocabulary: Vocabulary,
    *,
    limits: Limits | None = None,
    cache: GrammarCache | None = None,
) -> Grammar:
    """Compile the ``structured`` dict of a request, on this thread.

    spec: one of regex, json_schema, ebnf, choice, json; optional trigger (token ids after which the
    grammar starts) and lenient (ignore unsupported schema keywords, with warnings). Raises
    `GrammarError` and nothing else, one line that names the place.
    """
    limits = limits or Limits()
    what = " ".join(("structured", *(kind for kind in KINDS if kind in spec)))
    try:
        read = _Spec.read(spec, vocabulary.width, limits)
        key = read.key(vocabulary, limits)

        def make() -> Grammar:
            return _compile(read, key, vocabulary, limits)

        return cache.get(key, make) if cache else make()
    except GrammarError:
        raise
    except RecursionError:
        raise GrammarError(f"{what} is nested too deeply") from None
    except Exception as error:  # what a request holds must not end the requests beside it
        raise GrammarError(f"{what}: {reason_of(error)}") from error


class Compiler:
    """Compiles on worker threads, with one cache, for one vocabulary."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        limits: Limits | None = None,
        cache: GrammarCache | None = None,
        workers: int = 2,
    ):
        self.vocabulary, self.limits = vocabulary, limits or Limits()
        self.cache = cache or GrammarCache()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grammar")

    def submit(self, spec: Mapping[str, Any]) -> "Future[Grammar]":
        """Start compiling; the future's result is the grammar, or raises its `GrammarError`."""
        return self._threads.submit(
            compile, spec, self.vocabulary, limits=self.limits, cache=self.cache
        )

    def close(self) -> None:
        """Stop the threads; what is being compiled is finished first."""
        self._threads.shutdown()
