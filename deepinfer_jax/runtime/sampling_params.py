"""What a caller may ask of one request: ``SamplingParams``, checked when it is made.

Each field is checked for type, range and agreement with the others in ``__post_init__``; anything
wrong, an unknown option included, is a one-line ``ValueError`` that names the option. Values come
out in one form (ids as tuples of Python ints, strings as tuples), so the rest of the engine need
not look twice. What depends on the model (is an id inside the vocabulary, does the grammar compile)
is checked when the request is admitted.

The order in which the options act on the logits is written in ``sampling.py``.
"""

import dataclasses
import difflib
import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, no_type_check

import numpy as np

from deepinfer_jax.runtime.text import refuse_surrogates

MAX_LOGPROBS = 64  # alternatives per position that the compiled step returns
LARGE = 1e6  # no bias or penalty beyond it: the sum with a logit stays exact enough in float32
GRAMMARS = ("regex", "json_schema", "ebnf", "choice", "json")


def shown(value: object) -> str:
    """A value in a message: what `repr` says, or its beginning."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        text = f"a {type(value).__name__} of such size"
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """``value`` as an int of at least ``low`` (and below ``high``); a bool is not a number here."""
    wanted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high - 1}"
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number >= high):
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}")
    return number


def _number(name: str, value: object, wanted: str, low: float, high: float = math.inf) -> float:
    """``value`` as a finite float in [low, high]; ``wanted`` says the range in words."""
    if isinstance(value, Real) and not isinstance(value, bool | np.bool_):
        try:
            number = float(value)
        except OverflowError:  # an integer beyond all floats
            number = math.inf
        if math.isfinite(number) and low <= number <= high:
            return number
    raise ValueError(f"{name} must be {wanted}, got {shown(value)}")


def _ids(name: str, value: Any, *, unique: bool) -> tuple[int, ...]:
    """A non-empty sequence of token ids; sorted without repeats if ``unique``."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(
        value, Sequence | set | np.ndarray
    ):
        raise ValueError(f"{name} must be a list of token ids, got {shown(value)}")
    ids = tuple(_integer(f"{name}: each id", item, 0, 2**31) for item in value)
    if not ids:
        raise ValueError(f"{name} is empty: leave it out or name at least one id")
    return tuple(sorted(set(ids))) if unique else ids


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} must be a string or a list of strings, got {shown(value)}")
    if not value or not all(value):
        raise ValueError(f"{name} is empty: leave it out or give strings of at least one character")
    for item in value:
        refuse_surrogates(name, item)
    return tuple(dict.fromkeys(value))


def _id_of(key: Any) -> Any:
    """An id that is spelled as JSON spells it; anything else as it is, to be refused."""
    return int(key) if isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,9}", key) else key


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {shown(value)}")
    if not value:
        raise ValueError("logit_bias is empty: leave it out or name at least one id")
    return {
        _integer("logit_bias: each id", key, 0, 2**31): _number(
            f"logit_bias[{key}]", bias, "at most 1e6 in size (banned_token_ids bans)", -LARGE, LARGE
        )
        for key, bias in value.items()
    }


def _structured(value: object) -> dict[str, Any]:
    """Shape of a grammar request: one kind, its value's type, the two options. Not its content."""
    if not isinstance(value, Mapping):
        raise ValueError(f"structured must be a dict such as {{'regex': ...}}, got {shown(value)}")
    unknown = [key for key in value if key not in (*GRAMMARS, "trigger", "lenient")]
    if unknown:
        raise ValueError(f"structured has no key {unknown[0]!r}: it takes {', '.join(GRAMMARS)}")
    kinds = [key for key in GRAMMARS if key in value]
    if len(kinds) != 1:
        raise ValueError(f"structured needs exactly one of {', '.join(GRAMMARS)}, got {kinds}")
    result = dict(value)
    kind, spec = kinds[0], value[kinds[0]]
    if kind in ("regex", "ebnf") and not (isinstance(spec, str) and spec):
        raise ValueError(f"structured[{kind!r}] must be a non-empty string, got {shown(spec)}")
    if kind in ("regex", "ebnf"):
        refuse_surrogates(f"structured[{kind!r}]", spec)
    if kind == "json" and spec is not True:
        raise ValueError(f"structured['json'] must be True, got {shown(spec)}")
    if kind == "choice":
        result[kind] = _strings("structured['choice']", spec)
    if kind == "json_schema":
        result[kind] = _schema(spec)
    if "trigger" in value:
        result["trigger"] = _ids("structured['trigger']", value["trigger"], unique=False)
    if not isinstance(value.get("lenient", False), bool):
        raise ValueError(f"structured['lenient'] must be a bool, got {shown(value['lenient'])}")
    return result


def _schema(spec: object) -> Any:
    """A JSON schema, from its text too."""
    name = "structured['json_schema']"
    try:
        value = json.loads(spec) if isinstance(spec, str) else spec
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise ValueError(f"{name} must be an object, got {shown(value)}")
    refuse_surrogates(name, text)
    return value


def _routes(value: object) -> np.ndarray:
    routes = np.asarray(value)
    if routes.ndim != 3 or not np.issubdtype(routes.dtype, np.integer) or not routes.size:
        raise ValueError(
            "forced_routes must be integers of shape [tokens, layers, experts per token], got "
            f"{routes.dtype} of shape {list(routes.shape)}"
        )
    if not -(2**31) <= routes.min() <= routes.max() < 2**31:
        raise ValueError(f"forced_routes: experts {routes.min()}..{routes.max()} are no int32")
    return routes.astype(np.int32)


@no_type_check  # a type checker at run time would speak before the messages below
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    temperature: 0 is exact argmax (the lowest id of equals); otherwise logits are divided by it.
    top_k, top_p, min_p: keep the k likeliest (0: all), then the smallest set of those with mass
        top_p, then those at least min_p times as likely as the likeliest.
    repetition_penalty: divides positive and multiplies negative logits of ids seen in the prompt or
        the output; presence_penalty is subtracted once, frequency_penalty per occurrence in the
        output. logit_bias: id -> number added. allowed_token_ids / banned_token_ids: the rest, or
        these, never appear.
    min_tokens: no end-of-sequence and no stop id before so many; max_tokens: the most.
    n: samples of the prompt, each with its own noise. seed: of the request; None: from the LLM's.
    stop: strings that end the text (left out of it); stop_token_ids: ids that end it (kept among
        the ids, left out of the text); ignore_eos: the end-of-sequence id is an ordinary one.
    logprobs: None, or how many alternatives to return beside the chosen token (0: only it);
        prompt_logprobs likewise for the prompt, always of the raw model.
    logprobs_mode: "raw" (log-softmax of the model's logits) or "processed" (of the distribution
        that was sampled from).
    structured: {"regex": s} | {"json_schema": dict or s} | {"ebnf": s} | {"choice": [s]} |
        {"json": True}, optionally with "trigger": [ids] and "lenient": bool.
    forced_token_ids: the output begins with these, whatever the model says (teacher forcing).
    forced_routes: experts to use, int [tokens, layers, experts per token], by absolute position;
        -1 throughout a token's experts in a layer leaves them to the router.

    Raises ValueError, one line naming the option, for anything wrong or contradictory.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int = 256
    n: int = 1
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    structured: Mapping[str, Any] | None = None
    forced_token_ids: Sequence[int] | None = None
    forced_routes: Any = dataclasses.field(default=None, compare=False)

    def __new__(cls, *args: object, **options: object):
        # A dataclass would raise TypeError here; the interface promises ValueError with the name.
        known = [field.name for field in dataclasses.fields(cls)]
        if args:
            raise ValueError(f"SamplingParams takes options by name only, got {shown(args[0])}")
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ValueError(f"SamplingParams has no option {name!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self):
        checked: dict[str, Any] = {
            "temperature": _number("temperature", self.temperature, "a finite number >= 0", 0.0),
            "top_k": _integer("top_k", self.top_k, 0),
            "top_p": _number("top_p", self.top_p, "a number above 0 and at most 1", 5e-324, 1.0),
            "min_p": _number("min_p", self.min_p, "a number from 0 to 1", 0.0, 1.0),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, "from 1e-6 to 1e6", 1 / LARGE, LARGE
            ),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0),
            "max_tokens": _integer("max_tokens", self.max_tokens, 1),
            "n": _integer("n", self.n, 1),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            checked[name] = _number(name, getattr(self, name), "at most 1e6 in size", -LARGE, LARGE)
        for name, high in (
            ("seed", 2**64),
            ("logprobs", MAX_LOGPROBS + 1),
            ("prompt_logprobs", MAX_LOGPROBS + 1),
        ):
            if (value := getattr(self, name)) is not None:
                checked[name] = _integer(name, value, 0, high)
        for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids", "forced_token_ids"):
            if (value := getattr(self, name)) is not None:
                checked[name] = _ids(name, value, unique=name != "forced_token_ids")
        if self.logit_bias is not None:
            checked["logit_bias"] = _bias(self.logit_bias)
        if self.stop is not None:
            checked["stop"] = _strings("stop", self.stop)
        if self.structured is not None:
            checked["structured"] = _structured(self.structured)
        if self.forced_routes is not None:
            checked["forced_routes"] = _routes(self.forced_routes)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be a bool, got {shown(self.ignore_eos)}")
        if self.logprobs_mode not in ("raw", "processed"):
            raise ValueError(
                f"logprobs_mode must be 'raw' or 'processed', got {shown(self.logprobs_mode)}"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._contradictions()

    def _contradictions(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        both = set(self.allowed_token_ids or ()) & set(self.banned_token_ids or ())
        if both:
            raise ValueError(f"token id {min(both)} is both allowed and banned")
        biased = set(self.logit_bias or ())
        if lost := biased & set(self.banned_token_ids or ()):
            raise ValueError(f"token id {min(lost)} has a logit_bias and is banned")
        if self.allowed_token_ids and (lost := biased - set(self.allowed_token_ids)):
            raise ValueError(f"token id {min(lost)} has a logit_bias and is not allowed")
        if self.prompt_logprobs is not None and self.logprobs_mode == "processed":
            raise ValueError("prompt_logprobs are of the raw model: logprobs_mode must be 'raw'")
        if self.structured is not None and self.ignore_eos:
            raise ValueError("structured ends with the end of sequence: ignore_eos must be False")
        forced = self.forced_token_ids or ()
        if len(forced) > self.max_tokens:
            raise ValueError(
                f"forced_token_ids has {len(forced)} ids, more than max_tokens {self.max_tokens}"
            )
        if forced and self.structured is not None:
            raise ValueError("forced_token_ids and structured both decide the output: give one")

    @classmethod
    def from_json(cls, options: Mapping[str, Any]) -> "SamplingParams":
        """From options as JSON holds them: the ids of logit_bias are an object's keys, so text."""
        options, bias = dict(options), options.get("logit_bias")
        if isinstance(bias, Mapping):
            options["logit_bias"] = {_id_of(key): value for key, value in bias.items()}
        return cls(**options)

    @property
    def greedy(self) -> bool:
        """Whether the output is the argmax at each position."""
        return self.temperature == 0.0
