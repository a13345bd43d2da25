"""Numeric text within bounds, as automata over characters.

A number is compared as written: ``3.14 >= a`` holds if its integer part is larger than that of
``a``, or equal and its fraction digits are at least those of ``a``. Both sides of a range and the
negative mirror are such automata, combined by products. Exclusive bounds also limit the digits
after the point, so that what is read as a float still differs from the bound.
"""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from deepinfer_jax.structured.dfa import Dfa, determinise, embed, minimise, product
from deepinfer_jax.structured.errors import Budget
from deepinfer_jax.structured.nfa import Nfa, code_points
from deepinfer_jax.structured.ranges import MAX
from deepinfer_jax.structured.regex import language

MAX_MULTIPLE = 10_000
_INTEGER = r"0|-?[1-9][0-9]*"
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_FLOAT_DIGITS = 15  # decimal digits that every float keeps


class Bound(NamedTuple):
    value: Decimal
    strict: bool


class NumberSpec(NamedTuple):
    """low, high: None without a bound. multiple: 0 for none; it implies integers."""

    integer: bool = False
    low: Bound | None = None
    high: Bound | None = None
    multiple: int = 0

    def language(self, budget: Budget) -> Dfa:
        """Texts of the numbers, over code points."""
        if self.integer or self.multiple:
            dfa = language(_integers(self), budget)
            if self.multiple:
                dfa = product(dfa, _multiples(self.multiple, budget), budget)
            return dfa
        if self.low is None and self.high is None:
            return language(_NUMBER, budget)
        return _decimals(self.low, self.high, budget)

    def holds(self, value: int | float) -> bool:
        """Whether a number is one of these, however it is written: 6.0 is an integer."""
        exact = decimal(value)
        outside = [
            (exact == bound.value and bound.strict)
            or (exact < bound.value if low else exact > bound.value)
            for bound, low in ((self.low, True), (self.high, False))
            if bound is not None
        ]
        whole = exact == exact.to_integral_value()
        divides = not self.multiple or Fraction(exact) % self.multiple == 0
        return not any(outside) and divides and (whole or not self.integer)


def decimal(value: Any) -> Decimal:
    """A JSON number as it is written."""
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def _same_length(low: str, high: str) -> str:
    """Digit strings between two of the same length."""
    if set(low) <= {"0"} and set(high) <= {"9"}:
        return f"[0-9]{{{len(low)}}}" if low else ""
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    rest = len(low) - 1
    parts = [low[0] + _same_length(low[1:], "9" * rest)]
    if int(low[0]) + 1 < int(high[0]):
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    parts.append(high[0] + _same_length("0" * rest, high[1:]))
    return "(" + "|".join(parts) + ")"


def _natural(low: int, high: int | None) -> str:
    """Naturals without leading zeros in [low, high], or an impossible pattern."""
    if high is not None and high < low:
        return "[^\\x00-\\U0010FFFF]"
    first, last = str(low), str(high)
    if high is None:
        longer = f"[1-9][0-9]{{{len(first)},}}"
        return f"({_same_length(first, '9' * len(first))}|{longer})"
    parts = []
    for digits in range(len(first), len(last) + 1):
        start = first if digits == len(first) else "1" + "0" * (digits - 1)
        end = last if digits == len(last) else "9" * digits
        parts.append(_same_length(start, end))
    return "(" + "|".join(parts) + ")"


def _integers(spec: NumberSpec) -> str:
    low = high = None
    if spec.low is not None:
        low = math.ceil(spec.low.value)
        low += spec.low.strict and low == spec.low.value
    if spec.high is not None:
        high = math.floor(spec.high.value)
        high -= spec.high.strict and high == spec.high.value
    if low is None and high is None:
        return _INTEGER
    positive = _natural(max(low or 0, 0), high)
    negative = _natural(max(1, -high if high is not None else 1), None if low is None else -low)
    return f"{positive}|-{negative}"


def _fraction(digits: str, *, above: bool, equal: bool) -> str:
    """Fractional parts, point included or nothing, above (below) 0.digits, or equal to it."""
    digits = digits.rstrip("0")
    parts = []
    for i, digit in enumerate(digits):
        near = range(int(digit) + 1, 10) if above else range(int(digit))
        if near:
            parts.append(f"\\.{digits[:i]}[{near[0]}-{near[-1]}][0-9]*")
        if not above:
            parts.append(f"\\.{digits[:i]}0+" if i else "(\\.0+)?")
            parts.append(f"\\.{digits[:i]}" if i else "")
    if above:
        parts.append(f"\\.{digits}0*[1-9][0-9]*")
    if equal:
        parts.append(f"\\.{digits}0*" if digits else "(\\.0+)?")
    return "(" + "|".join(parts) + ")" if parts else "[^\\x00-\\U0010FFFF]"


def _magnitudes(low: Bound, high: Bound | None, budget: Budget) -> Dfa:
    """Texts of the decimals between two bounds that are at least 0, without sign."""
    any_fraction = r"(\.[0-9]+)?"
    whole, digits = _split(low.value)
    at_least = (
        f"{_natural(whole + 1, None)}{any_fraction}"
        f"|{whole}{_fraction(digits, above=True, equal=not low.strict)}"
    )
    dfa = language(at_least, budget)
    if high is not None:
        whole, digits = _split(high.value)
        at_most = f"{whole}{_fraction(digits, above=False, equal=not high.strict)}"
        if whole:
            at_most += f"|{_natural(0, whole - 1)}{any_fraction}"
        dfa = product(dfa, language(at_most, budget), budget)
    return dfa


def _split(value: Decimal) -> tuple[int, str]:
    whole = int(value)
    digits = f"{value - whole:f}"
    return whole, digits[2:] if "." in digits else ""


def _decimals(low: Bound | None, high: Bound | None, budget: Budget) -> Dfa:
    nfa = Nfa(code_points, budget)
    start, end = nfa.node(), nfa.node()
    zero = Bound(Decimal(0), False)
    if high is None or high.value >= 0:
        positive = zero if low is None or low.value < 0 else low
        nfa.skip(embed(nfa, start, _magnitudes(positive, high, budget)), end)
    if low is None or low.value < 0:
        nearest = Bound(Decimal(0), True)
        if high is not None and high.value < 0:
            nearest = Bound(-high.value, high.strict)
        farthest = None if low is None else Bound(-low.value, low.strict)
        minus = nfa.text(start, "-")
        nfa.skip(embed(nfa, minus, _magnitudes(nearest, farthest, budget)), end)
    dfa = determinise(nfa, start, end, MAX + 1)
    strict = [_split(abs(b.value))[0] for b in (low, high) if b is not None and b.strict]
    if strict:
        digits = _FLOAT_DIGITS - max(len(str(whole)) for whole in strict)
        fraction = f"(\\.[0-9]{{1,{digits}}})?" if digits > 0 else ""
        dfa = product(dfa, language(f"-?[0-9]+{fraction}", budget), budget)
    return dfa


def _multiples(n: int, budget: Budget) -> Dfa:
    """Integers divisible by n: the state is the remainder of the digits read."""
    table = np.zeros((n + 3, 12), np.int32)  # dead, start, after the sign, remainders
    digits = np.arange(10)
    table[1, 0], table[1:3, 1:11] = 2, 3 + digits % n
    remainders = (np.arange(n)[:, None] * 10 + digits) % n
    table[3:, 1:11] = 3 + remainders
    accept = np.zeros(n + 3, bool)
    accept[3] = True
    starts = np.array([0, ord("-"), ord("-") + 1, *range(ord("0"), ord("9") + 2)], np.int64)
    classes = np.array([11, 0, 11, *range(1, 11), 11], np.int64)
    return minimise(Dfa(starts, classes, table, accept), budget)


def whole_multiple(value: Any) -> int | None:
    """The divisor as an integer; None if it is not one, or too large to track remainders."""
    exact = Fraction(decimal(value))
    return int(exact) if exact.denominator == 1 and exact <= MAX_MULTIPLE else None
