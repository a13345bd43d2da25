"""Options of the command line that are numbers: refused where they are read, by name.

`positive`, `natural` and `positive_real` are types for `argparse`; `number`, `numbers` and `shares`
read texts that a handler asks for.
"""

import argparse
import math
from collections.abc import Sequence


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def positive_real(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """ "4k,100" -> [4096, 100]; raises ValueError naming the option."""
    found = []
    for part in text.lower().split(","):
        digits = part.strip().removesuffix("k")
        if not digits.isdecimal():
            raise ValueError(f"{option} {text}: expected numbers such as 256 or 4k, with commas")
        found.append(int(digits) * (1024 if part.strip().endswith("k") else 1))
    if min(found) < least:
        raise ValueError(f"{option} {text}: expected at least {least}")
    return found


def number(option: str, text: str, least: int = 1) -> int:
    """ "4k" -> 4096; raises ValueError naming the option."""
    found = numbers(option, text, least)
    if len(found) > 1:
        raise ValueError(f"{option} {text}: expected one number")
    return found[0]


def shares(text: str) -> Sequence[float]:
    """ "0.8,0.5" -> [0.8, 0.5]; raises ValueError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= share <= 1 for share in found):
        raise ValueError(f"--acceptance {text}: expected shares between 0 and 1, with commas")
    return found


def _integer(text: str, least: int) -> int:
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if found < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return found
