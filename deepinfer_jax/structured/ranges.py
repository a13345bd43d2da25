"""Sets of code points, and how their members are spelled in bytes.

A set is a sorted tuple of disjoint inclusive ranges. ``utf8_paths`` gives the byte strings of a
set as products of byte sets (a path is one byte set a position), after the observation that a
range of code points splits into few blocks whose continuation bytes are full:

    U+0800..U+FFFF  ->  E0 [A0-BF] [80-BF] | [E1-EC] [80-BF] [80-BF] | ED [80-9F] [80-BF] | ...

``json_paths`` gives every spelling inside a JSON string that our languages allow (RFC 8259, 7): raw
UTF-8, the two-character escapes, and ``\\uXXXX`` with surrogate pairs. A set that is not everything
allows ``\\uXXXX`` only where an encoder uses it: control characters and what is not ASCII.
Surrogates are no characters: they are in no path except as halves of an escaped pair.
"""

import functools
import unicodedata
from collections.abc import Iterable, Iterator

MAX = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
Path = tuple[Ranges, ...]

EVERYTHING: Ranges = ((0, MAX),)
DIGIT: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACE: Ranges = ((9, 13), (32, 32))
_SHORT_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r"}
_SHORT_ESCAPES["\t"] = "t"
_NEVER_RAW: Ranges = ((0, 31), (34, 34), (92, 92))
_ESCAPED_BY_ENCODERS: Ranges = ((0, 31), (127, MAX))
_UTF8_BLOCKS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, MAX))


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, disjoint, merged where adjacent."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(pair for one in sets for pair in one):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def complement(ranges: Ranges, top: int = MAX) -> Ranges:
    """Members of [0, top] outside a set."""
    out, start = [], 0
    for low, high in union(ranges):
        if low > start:
            out.append((start, low - 1))
        start = high + 1
    if start <= top:
        out.append((start, top))
    return tuple(out)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    """Members of both sets."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low <= high:
            out.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def points(text: str) -> Ranges:
    """The set of the characters of a text."""
    return union((ord(c), ord(c)) for c in text)


@functools.lru_cache(maxsize=8)
def unicode_category(name: str) -> Ranges:
    """What python's `re` takes for ``\\d``, ``\\w`` or ``\\s`` ("digit", "word", "space") without
    the ASCII flag; computed once, 0.2 s."""
    tests = {
        "digit": lambda c: unicodedata.category(c) == "Nd",
        "word": lambda c: c.isalnum() or c == "_",
        "space": str.isspace,
    }
    test = tests[name]
    return union((i, i) for i in range(MAX + 1) if test(chr(i)))


def _split(low: int, high: int) -> Iterator[Path]:
    first, last = chr(low).encode(), chr(high).encode()
    for i in range(1, len(first)):
        mask = (1 << (6 * i)) - 1
        if (low & ~mask) != (high & ~mask):
            if low & mask:
                yield from _split(low, low | mask)
                yield from _split((low | mask) + 1, high)
                return
            if (high & mask) != mask:
                yield from _split(low, (high & ~mask) - 1)
                yield from _split(high & ~mask, high)
                return
    yield tuple(((a, b),) for a, b in zip(first, last, strict=True))


def utf8_paths(ranges: Ranges) -> tuple[Path, ...]:
    """The UTF-8 spellings of a set's members, surrogates left out."""
    paths = []
    for block in _UTF8_BLOCKS:
        part = intersection(ranges, (block,))
        if part and block[1] == 0x7F:
            paths.append((part,))
        else:
            paths.extend(path for low, high in part for path in _split(low, high))
    return tuple(paths)


def _hex(low: int, high: int) -> Ranges:
    """Bytes of the hexadecimal digits low..high, both cases."""
    return points("".join(c for i in range(low, high + 1) for c in f"{i:x}{i:X}"))


def _four_digits(low: int, high: int, places: int = 4) -> Iterator[Path]:
    """Products of digit sets that spell low..high with four hexadecimal digits."""
    if places == 0:
        yield ()
        return
    unit = 16 ** (places - 1)
    first, last = low // unit, high // unit
    if first == last or (low % unit == 0 and high % unit == unit - 1):
        inner = (0, unit - 1) if first != last else (low % unit, high % unit)
        yield from ((_hex(first, last), *rest) for rest in _four_digits(*inner, places - 1))
        return
    cut = (first + 1) * unit if low % unit else last * unit
    yield from _four_digits(low, cut - 1, places)
    yield from _four_digits(cut, high, places)


def _escaped(ranges: Ranges) -> Iterator[Path]:
    start = (points("\\"), points("u"))
    for block in ((0, 0xD7FF), (0xE000, 0xFFFF)):
        for low, high in intersection(ranges, (block,)):
            yield from ((*start, *digits) for digits in _four_digits(low, high))
    for low, high in intersection(ranges, ((0x10000, MAX),)):
        low, high = low - 0x10000, high - 0x10000
        cuts = [low]
        if low >> 10 != high >> 10:  # the first and the last high half take part of the low halves
            cuts += [(low // 1024 + 1) * 1024] if low % 1024 else []
            cuts += [(high + 1) // 1024 * 1024]
        cuts = [c for c in dict.fromkeys(cuts) if c <= high]
        for a, b in zip(cuts, [*cuts[1:], high + 1], strict=True):
            lows = (0xDC00 + a % 1024, 0xDC00 + (b - 1) % 1024)
            for lead in _four_digits(0xD800 + (a >> 10), 0xD800 + ((b - 1) >> 10)):
                for trail in _four_digits(*lows):
                    yield (*start, *lead, *start, *trail)


@functools.lru_cache(maxsize=4096)
def json_paths(ranges: Ranges) -> tuple[Path, ...]:
    """The spellings of a set's members inside a JSON string."""
    paths = list(utf8_paths(intersection(ranges, complement(_NEVER_RAW))))
    short = "".join(e for c, e in _SHORT_ESCAPES.items() if intersection(ranges, points(c)))
    if short:
        paths.append((points("\\"), points(short)))
    escaped = ranges if ranges == EVERYTHING else intersection(ranges, _ESCAPED_BY_ENCODERS)
    paths.extend(_escaped(escaped))
    return tuple(paths)
