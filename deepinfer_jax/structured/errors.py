"""What can go wrong before a grammar runs, and the limits that keep a hostile one out.

Every error is a ``GrammarError`` (a ``ValueError``) of one line that names the place: position in a
regex, line and column of an EBNF text, JSON pointer and keyword of a schema. They are raised while
a request is admitted and concern that request alone.

``Limits`` are the sizes at which the device tiers give up; ``Budget`` carries them with a deadline
through one compilation, which calls it from its loops, so no thread has to be killed. Time is the
processor time of the compiling thread: what a grammar becomes does not depend on what else runs.
"""

import dataclasses
import time


class GrammarError(ValueError):
    """A structured-output request that cannot be served."""


class RegexError(GrammarError):
    """A regular expression that is malformed, or not regular (lookaround, backreference)."""


class EbnfError(GrammarError):
    """An EBNF text that does not parse; the message starts with line and column."""


class SchemaError(GrammarError):
    """A JSON schema with an unsupported, malformed or unsatisfiable part, named by pointer."""

    def __init__(self, pointer: str, message: str):
        super().__init__(f"json_schema at '#{pointer}': {message}")
        self.pointer = pointer


class TierError(GrammarError):
    """The device tiers cannot hold this grammar; the text is the reason. The host tier may."""


class PoolFullError(RuntimeError):
    """No room in the device pool: retry when a grammar is released, or use the host tier."""


def reason_of(error: Exception) -> str:
    """What a request that ended with this error is told, on one line: the message of a
    `GrammarError`; of an error that nobody foresaw its type too, and no more than its first line.
    """
    if isinstance(error, GrammarError):
        return str(error)
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:300]}".removesuffix(": ")


@dataclasses.dataclass(frozen=True)
class Limits:
    """spec_bytes: length of a regex, schema or EBNF text. repeat: largest bound of a repetition.
    nodes: automaton nodes before determinisation. states: after it. cells: states x token classes,
    while compiling. table: int32 cells of the packed tables.
    classes, edges, exits: token classes and stack outcomes of one grammar (exits: those that
    leave a frame), as many as the device pool takes. stack: levels of the pushdown stack. seconds:
    processor time of the device tiers.
    """

    spec_bytes: int = 1_000_000
    repeat: int = 20_000
    nodes: int = 400_000
    states: int = 100_000
    cells: int = 64_000_000
    table: int = 1 << 22
    classes: int = 4096
    edges: int = 1024
    exits: int = 256
    stack: int = 32
    seconds: int | float = 10


class Budget:
    """The limits of one compilation, and its deadline on the clock of the thread that makes it."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.deadline = time.thread_time() + limits.seconds
        self._calls = 0

    def check(self, what: str, amount: int = 0, limit: int | None = None) -> None:
        """Raise `TierError` if ``amount`` is over ``limit`` or the deadline has passed."""
        if limit is not None and amount > limit:
            raise TierError(f"more than {limit} {what}")
        self._calls += 1
        if self._calls % 16 == 1 and time.thread_time() > self.deadline:
            raise TierError(f"not compiled within {self.limits.seconds:g} s ({what})")
