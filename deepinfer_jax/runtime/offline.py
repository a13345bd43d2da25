"""Offline batches: a JSONL file of requests in, a JSONL file of results out, resumable.

Input, one object a line: "id" (any JSON string or number, unique), "prompt" (text) or
"prompt_token_ids", and any field of `SamplingParams`. Output, in the order of finishing:
{"id", "prompt_tokens", "outputs": [{"text", "token_ids", "finish_reason", ...}], "error"}.

Every input line gives exactly one output line, also one that cannot be served. A run that was
killed at any moment goes on where it ended: a half-written last line is cut off, ids that are in
the output are skipped. A request without a seed gets one from its line number, so it draws the same
noise in whatever run it is served.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepinfer_jax.runtime.engine import LLM, Prompt
from deepinfer_jax.runtime.outputs import RequestOutput
from deepinfer_jax.runtime.sampling_params import SamplingParams

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

    defaults: SamplingParams fields for requests that do not name them. Raises ValueError naming
    file and line for an input that is not JSONL or repeats an id, before anything is written.
    """
    source, target = Path(source), Path(target)
    total = sum(1 for _ in records(source, defaults))
    done = recover(target)
    failed, tokens = 0, 0
    waiting = (record for record in records(source, defaults) if record.id not in done)
    taken: dict[int, Record] = {}
    with target.open("a", encoding="utf-8") as file, _progress(console) as progress:
        task = progress.add_task("requests", total=total, completed=len(done), speed="")
        started = progress.get_time()

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            seconds = max(progress.get_time() - started, 1e-9)
            progress.update(task, advance=1, speed=f"{tokens / seconds:.0f} tokens/s")

        def work() -> Iterator[tuple[Prompt, SamplingParams]]:
            for record in waiting:
                if record.error is not None:
                    write(_line(record, RequestOutput(None, [], error=record.error)))
                    continue
                taken[len(taken)] = record
                yield record.prompt, record.params

        for number, request in llm.finished(work()):
            tokens += request.metrics.generated_tokens
            failed += request.error is not None
            write(_line(taken[number], request))
    return failed + sum(record.error is not None for record in records(source, defaults))


def records(source: Path, defaults: dict[str, Any]) -> Iterator[Record]:
    """The file's requests; a line that is an object with an id always gives one."""
    seen: set[Any] = set()
    with source.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            where = f"{source}, line {number}"
            try:
                raw = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error})") from None
            if not isinstance(raw, dict) or not isinstance(raw.get("id"), str | int | float):
                raise ValueError(f'{where}: expected an object with an "id"')
            if raw["id"] in seen:
                raise ValueError(f"{where}: id {raw['id']!r} appears twice")
            seen.add(raw["id"])
            yield _record(raw, {"seed": number, **defaults})


def recover(target: Path) -> set[Any]:
    """Ids that an output file holds; a last line without its end is cut off."""
    if not target.exists():
        return set()
    data = target.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with target.open("r+b") as file:
            file.truncate(whole)
    done = set()
    for number, text in enumerate(data[:whole].decode().splitlines(), start=1):
        try:
            done.add(json.loads(text)["id"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{target}, line {number}: not a result of such a run") from None
    return done


def _record(raw: dict[str, Any], defaults: dict[str, Any]) -> Record:
    options = {**defaults, **{key: value for key, value in raw.items() if key in _FIELDS}}
    try:
        unknown = sorted(set(raw) - _FIELDS - {"id", "prompt", "prompt_token_ids"})
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}")
        if ("prompt" in raw) == ("prompt_token_ids" in raw):
            raise ValueError('give either "prompt" or "prompt_token_ids"')
        prompt = raw.get("prompt", raw.get("prompt_token_ids"))
        if not isinstance(prompt, str if "prompt" in raw else list):
            raise ValueError("prompt: expected text, prompt_token_ids: a list of integers")
        return Record(raw["id"], prompt, SamplingParams(**options))
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


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
