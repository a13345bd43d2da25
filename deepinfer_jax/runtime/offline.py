"""Offline batches: a JSONL file of requests in, a JSONL file of results out, resumable.

Input, one object a line: "id" (any JSON string or number, unique), "prompt" (text) or
"prompt_token_ids", and any field of `SamplingParams`. Output, in the order of finishing:
{"id", "prompt_tokens", "outputs": [{"text", "token_ids", "finish_reason", ...}], "error"};
a log-probability of null is that of what cannot happen.

Every input line gives exactly one output line, also one that cannot be served. A run that was
killed at any moment goes on where it ended: a half-written last line is cut off, ids that are in
the output are skipped. Of several processes (`cluster.py`) the first reads and writes the output.
A request without a seed gets one from its line number, so it draws the same
noise in whatever run it is served.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepinfer_jax.runtime import cluster, noise
from deepinfer_jax.runtime.engine import LLM, Prompt
from deepinfer_jax.runtime.outputs import DraftCounts, RequestOutput, json_line
from deepinfer_jax.runtime.sampling_params import SamplingParams

LINE_SECONDS = 10.0
_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}


@dataclasses.dataclass(frozen=True)
class Record:
    """A request of the file; error: why it cannot be one."""

    id: str | int | float
    prompt: Prompt
    params: SamplingParams
    error: str | None = None


def run(
    llm: LLM,
    source: str | Path,
    target: str | Path,
    defaults: dict[str, Any],
    console: Console,
) -> int:
    """Serves every request of `source` that `target` does not hold yet; how many failed.

    defaults: SamplingParams fields for requests that do not name them; a seed there is the batch's,
    each line draws its own from it. Raises ValueError naming file and line for an input that is not
    JSONL or repeats an id, before anything is written; KeyboardInterrupt with a message for the
    user after what was finished has been written; OSError for files that cannot be read or written.
    """
    source, target = Path(source), Path(target)
    total = sum(1 for _ in records(source, defaults))
    done = dict(cluster.from_first(lambda: list(recover(target).items())))
    waiting = (record for record in records(source, defaults) if record.id not in done)
    taken: dict[int, Record] = {}
    quiet = console if cluster.is_first() else Console(quiet=True)
    with _named(target), cluster.results(target) as file, Report(quiet, total, len(done)) as report:

        def write(record: Record, request: RequestOutput) -> None:
            file.write(json_line(_line(record, request)) + "\n")
            file.flush()
            report.add(request)

        def work() -> Iterator[tuple[Prompt, SamplingParams]]:
            for record in waiting:
                if record.error is None:
                    taken[report.entered] = record
                    report.entered += 1
                    yield record.prompt, record.params
                else:
                    write(record, RequestOutput(None, [], error=record.error))

        try:
            for number, request in llm.finished(work()):
                write(taken.pop(number), request)
        except KeyboardInterrupt:
            message = f"; {report.done} of {total} results are in {target}, and the same command "
            raise KeyboardInterrupt(message + "goes on from there") from None
    return report.failed + sum(failed for failed in done.values())


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds a file's name to an error of writing it, such as a full disk's, which has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def records(source: Path, defaults: dict[str, Any]) -> Iterator[Record]:
    """The file's requests; a line that is an object with an id always gives one."""
    seen: set[Any] = set()
    with source.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            where = f"{source}, line {number}"
            try:
                raw = json.loads(text.decode())
            except RecursionError:
                raise ValueError(f"{where}: nested too deeply") from None
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error})") from None
            if not isinstance(raw, dict) or not _is_id(raw.get("id")):
                raise ValueError(f'{where}: expected an object with an "id", text or a number')
            if raw["id"] in seen:
                raise ValueError(f"{where}: id {raw['id']!r} appears twice")
            seen.add(raw["id"])
            # Its own noise in whatever run it is served, with or without a seed for the batch.
            base = defaults.get("seed")
            seed = number if base is None else noise.fold_in(base, number)
            yield _record(raw, {**defaults, "seed": seed})


def recover(target: Path) -> dict[Any, bool]:
    """Ids that an output file holds, and whether each failed; a last line without its end is cut
    off."""
    if not target.exists():
        return {}
    data = target.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with target.open("r+b") as file:
            file.truncate(whole)
    done = {}
    # Lines of bytes: those of text would also end at U+0085, U+2028 and U+2029, which stand in JSON
    # strings as themselves.
    for number, text in enumerate(data[:whole].splitlines(), start=1):
        try:
            line = json.loads(text.decode())
            done[line["id"]] = line["error"] is not None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{target}, line {number}: not a result of such a run") from None
    return done


def _is_id(value: Any) -> bool:
    """Whether a value is found again in the output: NaN equals nothing, true equals 1."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _record(raw: dict[str, Any], defaults: dict[str, Any]) -> Record:
    options = defaults | {key: value for key, value in raw.items() if key in _FIELDS}
    if options["seed"] is None:  # the engine's would depend on how many requests went before
        options["seed"] = defaults["seed"]
    try:
        unknown = sorted(set(raw) - _FIELDS - {"id", "prompt", "prompt_token_ids"})
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}")
        if ("prompt" in raw) == ("prompt_token_ids" in raw):
            raise ValueError('give either "prompt" or "prompt_token_ids"')
        prompt = raw.get("prompt", raw.get("prompt_token_ids"))
        if not isinstance(prompt, str if "prompt" in raw else list):
            raise ValueError("prompt: expected text, prompt_token_ids: a list of integers")
        return Record(raw["id"], prompt, SamplingParams.from_json(options))
    except ValueError as error:
        return Record(raw["id"], "", SamplingParams(), str(error))


def _line(record: Record, request: RequestOutput) -> dict[str, Any]:
    outputs = []
    for output in request.outputs:
        one = dataclasses.asdict(output)
        del one["captured"]
        if output.logprobs is None:
            del one["logprobs"]
        outputs.append(one)
    line = {
        "id": record.id,
        "prompt_tokens": request.metrics.prompt_tokens,
        "outputs": outputs,
        "error": request.error,
    }
    if request.prompt_logprobs is not None:
        line["prompt_logprobs"] = request.prompt_logprobs
    return line


class Report:
    """Progress of a batch: a bar on a terminal, else a line every few seconds.

    entered: requests given to the engine; failed: results with an error; done: results in all.
    """

    def __init__(self, console: Console, total: int, done: int):
        self.entered, self.failed = 0, 0
        self.done, self._total = done, total
        self._tokens, self._steps, self._fed, self._extra = 0, 0, 0, 0
        self._drafts = DraftCounts()
        self._started = self._shown = time.monotonic()
        self._console = console
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> "Report":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if not self._console.is_terminal:
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    def add(self, request: RequestOutput) -> None:
        """One result more."""
        metrics = request.metrics
        self.done += 1
        self.failed += request.error is not None
        self._tokens += metrics.generated_tokens
        self._steps += metrics.decode_steps
        self._fed += metrics.verified_rows
        self._extra += metrics.accepted_rows
        self._drafts.add(metrics.drafts)
        self._bar.update(self._task, advance=1, description=self._speed())
        if not self._console.is_terminal and time.monotonic() - self._shown > LINE_SECONDS:
            self._shown = time.monotonic()
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    def _line(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.done}/{self._total} requests{failed}, {self._speed()}"

    def _speed(self) -> str:
        parts = [f"{self._tokens / max(time.monotonic() - self._started, 1e-9):.0f} tokens/s"]
        if self._drafts.judged:
            rates = " ".join(f"{rate:.2f}" for rate in self._drafts.acceptance if rate is not None)
            parts.append(f"{1 + self._extra / max(self._steps, 1):.2f} tokens a step")
            parts.append(f"drafts accepted {rates}")
            if self._extra:
                parts.append(f"{self._fed / self._extra:.2f} verified for each")
            parts.append(f"calibration error {self._drafts.calibration_error:.2f}")
        return ", ".join(parts)
