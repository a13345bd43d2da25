"""`deepinfer-jax generate`: continue prompts, on one device or a layout of them."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SAMPLING: dict[str, type] = {
    "max_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "min_tokens": int,
    "n": int,
    "seed": int,
    "logprobs": int,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command, cache and device left out."""
    parser.add_argument("--model", metavar="DIR", help="folder or Hub id; default: the demo")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be given repeatedly")
    parser.add_argument("--input", metavar="F.jsonl", help="requests, one object a line")
    parser.add_argument("--output", metavar="F.jsonl", help="results; an interrupted run resumes")
    parser.add_argument("--json", action="store_true", help="print results as JSON lines")
    sampling = parser.add_argument_group("sampling")
    for name, kind in _SAMPLING.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__)
    sampling.add_argument("--stop", action="append", metavar="TEXT")
    sampling.add_argument("--ignore-eos", action="store_true")
    grammar = parser.add_argument_group("structured output (at most one)")
    grammar = grammar.add_mutually_exclusive_group()
    grammar.add_argument("--regex", metavar="PATTERN")
    grammar.add_argument("--json-schema", metavar="FILE")
    grammar.add_argument("--ebnf", metavar="FILE")
    grammar.add_argument("--choice", action="append", metavar="TEXT")
    grammar.add_argument("--json-object", action="store_true", help="any JSON object")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--numerics", default="reference", help="reference, bf16 or float32")
    engine.add_argument("--replay", default="full", help="full, mask or compact")
    engine.add_argument("--invariant", action="store_true", help="bits independent of the batch")
    engine.add_argument("--speculate", metavar="K", help="draft tokens a step, 0: off, adaptive")
    engine.add_argument("--accept", default="coupled", help="coupled or rejection")
    engine.add_argument("--kernels", default="auto", help="auto, a name, or JSON {op: name}")
    engine.add_argument("--max-slots", type=int, default=8, help="requests computed at once")
    engine.add_argument("--max-context", type=int, default=1024, help="most tokens of a request")
    engine.add_argument(
        "--prefix-cache",
        nargs="?",
        const="",
        metavar="DIR",
        help="prompts that begin alike are computed once; DIR: also in later runs",
    )
    engine.add_argument(
        "--prefix-restore",
        choices=("state", "replay"),
        default="state",
        help="state: exact; replay: 128 tokens of a found prefix are computed again instead",
    )
    group = parser.add_argument_group("several devices")
    group.add_argument("--layout", metavar="LAYOUT", help="file or shipped name")
    group.add_argument("--axis", action="append", default=[], metavar="NAME=SIZE")
    group.add_argument(
        "--prefill-layout",
        metavar="LAYOUT",
        help="prompts are computed on other devices, those after --layout's, under this one",
    )
    group.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="groups of the layout's devices"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="of the first process")
    group.add_argument("--num-processes", type=int, metavar="N")
    group.add_argument("--process-id", type=int, metavar="I")
    group.add_argument("--record-experts", metavar="F.npz", help="tokens by expert and step")
    parser.add_argument("--trace", metavar="DIR", help="write a profile of the run (jax.profiler)")


def run(options: argparse.Namespace, device: Any, cache: Callable[[], Any]) -> int:
    """The command; device: a `platform.Request`; cache: settles the folder of compiled programs."""
    given = {name: getattr(options, name) for name in (*_SAMPLING, "stop")}
    fields = {name: value for name, value in given.items() if value is not None}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    structured = _structured(options)
    if structured is not None:
        fields["structured"] = structured
    if (options.input is None) != (options.output is None):
        raise ValueError("--input and --output go together")
    if (options.prompt is None) == (options.input is None):
        raise ValueError("give --prompt, or --input with --output")

    import jax
    from rich.console import Console

    from deepinfer_jax.commands.layout import sizes
    from deepinfer_jax.config import Numerics
    from deepinfer_jax.lab.commands import read
    from deepinfer_jax.runtime import cluster, experts, offline, terminal
    from deepinfer_jax.runtime.engine import LLM
    from deepinfer_jax.runtime.handover import Group
    from deepinfer_jax.runtime.prefix_types import PrefixPolicy
    from deepinfer_jax.runtime.sampling_params import SamplingParams

    SamplingParams(**fields)  # refused before the model is read
    names = [options.layout, options.prefill_layout]
    if options.axis and names == [None, None]:
        raise ValueError("--axis: give --layout too")
    found = iter(read([name for name in names if name is not None], sizes(options.axis)))
    layout, beside = (None if name is None else next(found) for name in names)
    more = 0 if beside is None else beside.size
    processes = cluster.Processes.parse(
        options.coordinator, options.num_processes, options.process_id
    )
    if options.replicas > 1:
        if processes.count > 1:
            raise ValueError("--replicas: in one process only")
        more += (options.replicas - 1) * (1 if layout is None else layout.size)
    for notice in cluster.start(device, layout, processes, more).notices:
        print(f"deepinfer-jax: {notice}", file=sys.stderr)
    prefix_cache = None
    if options.prefix_cache is not None:
        restore, folder = options.prefix_restore, Path(options.prefix_cache or ".")
        prefix_cache = PrefixPolicy(
            restore=restore,
            states=0 if restore == "replay" else PrefixPolicy.states,
            folder=folder if options.prefix_cache else None,
        )
    elif options.prefix_restore != "state":
        raise ValueError("--prefix-restore: give --prefix-cache too")
    prefill = None
    if beside is not None:
        if processes.count > 1:
            raise ValueError("--prefill-layout: in one process only")
        used = 1 if layout is None else layout.size
        prefill = Group(beside, jax.devices()[used : used + beside.size])
    llm = LLM(
        options.model,
        layout,
        prefill=prefill,
        kernels=options.kernels,
        numerics=Numerics.preset(
            options.numerics, replay=options.replay, invariant=options.invariant
        ),
        prefix_cache=prefix_cache or False,
        max_slots=options.max_slots,
        max_context=options.max_context,
        speculate=drafts(options.speculate),
        accept=options.accept,
        cache=cache(),
        replicas=options.replicas,
    )
    with terminal.traced(options.trace), contextlib.ExitStack() as stack:
        if options.record_experts is not None:
            counts = stack.enter_context(experts.recorded(llm))
            if cluster.is_first():
                stack.callback(counts.save, options.record_experts)
        if options.prefix_cache:
            stack.callback(llm.save_prefixes)
        if options.input is not None:
            failed = offline.run(llm, options.input, options.output, fields, Console(stderr=True))
            return 1 if failed else 0
        return terminal.show(llm, options.prompt, SamplingParams(**fields), options.json)


def _structured(options: argparse.Namespace) -> dict[str, Any] | None:
    if options.regex is not None:
        return {"regex": options.regex}
    if options.json_schema is not None:
        return {"json_schema": _text(options.json_schema)}
    if options.ebnf is not None:
        return {"ebnf": _text(options.ebnf)}
    if options.choice is not None:
        return {"choice": options.choice}
    return {"json": True} if options.json_object else None


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def drafts(text: str | None) -> int | str | None:
    """--speculate as `LLM` takes it."""
    return int(text) if text and text.isdigit() else text
