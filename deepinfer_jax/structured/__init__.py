"""Structured output: regex, JSON schema and EBNF compiled to tables that the device follows.

A grammar becomes a deterministic automaton over bytes, with a stack if its rules nest; automaton
and vocabulary become token tables; the step masks logits with them and moves on by the sampled
token, all on the device. `compile` is the front door; `device` has what the step calls; `pool`
keeps the tables of the grammars in use; `host` runs the few that do not fit.
"""

from deepinfer_jax.structured.compiler import Compiler, GrammarCache, compile
from deepinfer_jax.structured.device import (
    FREE,
    GrammarState,
    Pool,
    advance,
    free,
    mask,
    reset,
    start,
    take,
    walk,
)
from deepinfer_jax.structured.errors import (
    EbnfError,
    GrammarError,
    Limits,
    PoolFullError,
    RegexError,
    SchemaError,
)
from deepinfer_jax.structured.grammar import Grammar, Report
from deepinfer_jax.structured.host import HostMatcher
from deepinfer_jax.structured.pool import PoolManager
from deepinfer_jax.structured.vocabulary import Vocabulary

__all__ = [
    "FREE",
    "Compiler",
    "EbnfError",
    "Grammar",
    "GrammarCache",
    "GrammarError",
    "GrammarState",
    "HostMatcher",
    "Limits",
    "Pool",
    "PoolFullError",
    "PoolManager",
    "RegexError",
    "Report",
    "SchemaError",
    "Vocabulary",
    "advance",
    "compile",
    "free",
    "mask",
    "reset",
    "start",
    "take",
    "walk",
]
