"""Sweeps over slices, as JSON lines: one record a point, with every condition of its figure.

    prefill   tokens a step, in prompts of one length
    decode    requests a device x rows verified a request, at one context length

Synthetic weights accept no drafts worth mentioning, so a step's tokens are not measured: with an
acceptance profile (share of drafts that stand, by place, each given the ones before it) a record
has the tokens that the measured step would give, 1 + a1 + a1 a2 + ...; else only rows a second.
A point that does not fit the device is a record with its error.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.bench import counts, slices
from deepinfer_jax.bench.counts import Rows
from deepinfer_jax.bench.slices import Slice
from deepinfer_jax.config import ModelConfig, Numerics
from pallas_kernels import Kernels


@dataclasses.dataclass(frozen=True)
class Part:
    """What of the model is run: `layers`, or the share of one of `ranks`."""

    cfg: ModelConfig
    numerics: Numerics
    layers: tuple[int, ...] | None = None
    ranks: int = 64
    draft: bool = True
    kernels: Kernels = dataclasses.field(default_factory=Kernels.auto)

    @property
    def manner(self) -> str:
        """What a point's name says of the numerics."""
        return ", invariant" if self.numerics.invariant else ""

    def slice(self, phase: str, rows: Rows, draft: bool) -> Slice:
        if self.layers is not None:
            return slices.layers(
                self.cfg, self.layers, self.numerics, rows, tables=self.ranks, kernels=self.kernels
            )
        return slices.rank(
            self.cfg, self.ranks, self.numerics, phase, rows, draft=draft, kernels=self.kernels
        )


@dataclasses.dataclass(frozen=True)
class Point:
    """One program of a sweep. tokens: that a step gives, None if that is not known."""

    name: str
    part: Part
    phase: str
    rows: Rows
    draft: bool
    tokens: float | None

    def slice(self) -> Slice:
        """The slice to be run, nothing of it drawn yet."""
        return self.part.slice(self.phase, self.rows, self.draft)


def prefill(part: Part, tokens: Sequence[int], prompt: int) -> Iterator[Point]:
    """A point for each number of tokens a step; fewer than `prompt` are one shorter prompt. Raises
    ValueError for tokens that are not whole prompts."""
    for count in tokens:
        width = min(prompt, count)
        if count % width:
            raise ValueError(f"tokens = {count}; expected a multiple of the prompt, {prompt}")
        rows = Rows(count // width, width)
        name = f"prefill, {count} tokens in prompts of {width}{part.manner}"
        yield Point(name, part, "prefill", rows, part.draft, float(count))


def decode(
    part: Part,
    requests: Sequence[int],
    widths: Sequence[int],
    context: int,
    acceptance: Sequence[float] | None,
) -> Iterator[Point]:
    """As `prefill`; one row a request runs without a drafter. Raises ValueError."""
    if acceptance is not None and len(acceptance) < max(widths) - 1:
        raise ValueError(
            f"acceptance: {len(acceptance)} places; {max(widths)} rows verify {max(widths) - 1}"
        )
    for width in widths:
        if not 0 < width < context:
            raise ValueError(f"rows = {width}; expected 1..{context - 1}")
        each = 1.0 if width == 1 else None
        if width > 1 and acceptance is not None:
            each = counts.accepted(acceptance[: width - 1])
        for many in requests:
            rows = Rows(many, width, context - width)
            name = f"decode, {many} requests x {width} rows, context {context}{part.manner}"
            gained = None if each is None else many * each
            yield Point(name, part, "decode", rows, part.draft and width > 1, gained)


def measured(
    points: Iterable[Point], measure: Callable[[Point], dict[str, Any]]
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Each point and what `measure` says of it, or that it does not fit."""
    for point in points:
        try:
            yield point, measure(point)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            yield point, {"seconds": None, "error": " ".join(str(error).split())[:300]}


def records(
    found: Iterable[tuple[Point, dict[str, Any]]], common: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """A record for each point: `common`, then what was measured of it."""
    for point, one in found:
        took = one["seconds"] and one["seconds"]["median"]
        fast = None if point.tokens is None or took is None else point.tokens / took
        named = {"name": point.name, **common, "tokens_per_turn": point.tokens}
        yield named | one | {"tokens_s": fast}


def text(record: dict[str, Any]) -> str:
    """One line for a reader."""
    name = record["name"]
    if "error" in record:
        return f"{name}: failed: {record['error'][:100]}"
    if "needed" not in record:
        return f"{name}: " + ", ".join(_engine(record))
    flop, moved = (sum(record["needed"][key].values()) for key in ("flop", "bytes"))
    work = f"{flop / 1e12:.4g} TFLOP, {moved / 1e9:.4g} GB"
    if record["seconds"] is None:
        held, peak = record["traced"]["held_bytes"], record["traced"]["peak_bytes"]
        memory = f"holds {held / 2**30:.1f} GiB and {peak / 2**30:.1f} GiB at the peak"
        return f"{name}: {work}, {memory}; traced, not run"
    took, reach = record["seconds"], record["reached"]
    parts = [
        f"{took['median'] * 1e3:.3f} ms ({took['p10'] * 1e3:.3f} to {took['p90'] * 1e3:.3f})",
        work,
        f"{reach['of_arithmetic']:.1%} of bf16, {reach['of_memory']:.1%} of the copy rate",
        f"bound by {reach['bound']}, {reach['of_floor']:.1%} of its floor",
        f"dispatched in {record['dispatch']['median'] * 1e3:.3f} ms",
    ]
    if record["tokens_s"] is not None:
        parts.append(f"{record['tokens_s']:.0f} tokens/s")
    if "idle" in record:
        parts.append(_waiting(record["idle"]))
    return f"{name}: " + ", ".join(parts)


def _engine(record: dict[str, Any]) -> Iterator[str]:
    if "tokens_s" in record:
        yield f"{record['tokens_s']:.0f} tokens/s, its steps alone {record['step_tokens_s']:.0f}"
        yield f"engine/device {record['engine_device']:.3f}"
    if "idle" in record:
        yield _waiting(record["idle"])
        yield f"{record['steps']} steps"


def _waiting(idle: dict[str, Any]) -> str:
    if idle["between"] is None:
        return f"{idle['idle']:.2%} idle"
    return f"{idle['between']:.2%} idle between steps, {idle['idle']:.2%} with the gaps inside"


def report(found: Iterable[dict[str, Any]], out: str | None, as_json: bool) -> int:
    """Prints every record when it is known and appends it to a file; the exit code: 1 if a point
    does not fit."""
    failed = False
    for record in found:
        line = json.dumps(record)
        failed |= "error" in record
        if out is not None:
            with Path(out).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        print(line if as_json else text(record), flush=True)
    return int(failed)


def read(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Records of JSONL files. Raises ValueError naming file and line."""
    found = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: no JSON ({error})") from error
    return found


def command() -> str:
    """The command line that this process was started with."""
    return " ".join(["deepinfer-jax", *sys.argv[1:]])
