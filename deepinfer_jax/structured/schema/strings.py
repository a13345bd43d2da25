"""String content: lengths in code points, patterns and formats, as automata over code points.

Formats are written as regular expressions that keep to what validators agree on: dates exist (leap
years included), years start at 0001, seconds stop at 59, host names stay within their total length
by allowing eight labels of 30 characters.
"""

import re
from typing import NamedTuple

from deepinfer_jax.structured.dfa import Dfa, product
from deepinfer_jax.structured.errors import Budget
from deepinfer_jax.structured.regex import language

_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = r"(0[48]|[2468][048]|[13579][26])"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_HMS = r"T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_YMD = r"([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,28}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        rf"({_GROUP}:){{7}}{_GROUP}",
        *(
            (rf"({_GROUP}:){{{left - 1}}}{_GROUP}" if left else "")
            + "::"
            + (rf"({_GROUP}(:{_GROUP}){{0,{6 - left}}})?" if left < 7 else "")
            for left in range(8)
        ),
    ]
)
_PCHAR = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(//{_LABEL}(\.{_LABEL}){{0,7}}(:[1-9][0-9]{{0,3}})?(/{_PCHAR}*)*"
    rf"|{_PCHAR}+(/{_PCHAR}*)*)(\?({_PCHAR}|[/?])*)?(\#({_PCHAR}|[/?])*)?"
)
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P([0-9]+W|{_YMD}({_HMS})?|{_HMS})",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL}){{1,7}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,7}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "json-pointer": r"(/([^/~]|~[01])*)*",
}
_ANY = r"(?s).*"


class StringSpec(NamedTuple):
    """shortest, longest (None: no bound) in code points; patterns search, formats match whole."""

    shortest: int = 0
    longest: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()

    def language(self, budget: Budget) -> Dfa:
        """Texts of the strings, over code points, without quotes or escapes."""
        if self.longest is not None and self.longest < self.shortest:
            return language("[^\\x00-\\U0010FFFF]", budget)
        longest = "" if self.longest is None else self.longest
        bounded = self.shortest or self.longest is not None
        dfa = language(rf"(?s).{{{self.shortest},{longest}}}" if bounded else _ANY, budget)
        for pattern in self.patterns:
            dfa = product(dfa, language(pattern, budget, search=True), budget)
        for name in self.formats:
            dfa = product(dfa, language(FORMATS[name], budget), budget)
        return dfa


def texts(words: list[str], budget: Budget) -> Dfa:
    """The language of some texts."""
    return language("|".join(map(re.escape, words)), budget)
