"""Structured output: regex, JSON schema and EBNF compiled to tables that the device follows.

A grammar becomes a byte automaton, the automaton and the vocabulary become token tables, and the
step masks logits with them.
"""
