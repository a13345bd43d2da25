"""The command line: `deepinfer-jax COMMAND --help`.

Commands import what they need when they run, so that `--help` and `convert` stay quick and need no
accelerator. Exit codes: 0 done, 1 done but something failed or does not fit, 2 refused; errors are
one line each on stderr.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

Handler = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    raw = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options, rest = parser.parse_known_args(raw)
    if options.command == "convert":
        from converters import from_hf

        return from_hf.main(raw[raw.index("convert") + 1 :])
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return options.handler(options)
    except (ValueError, FileNotFoundError) as error:
        for line in str(error).splitlines():
            print(f"deepinfer-jax: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"deepinfer-jax: interrupted{interrupt}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepinfer-jax", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _generate_options(commands.add_parser("generate", help="continue prompts with a model"))
    _chat_options(commands.add_parser("chat", help="talk with a model in the terminal"))
    commands.add_parser("convert", help="official checkpoint -> converted folder", add_help=False)
    _inspect_options(commands.add_parser("inspect", help="what a checkpoint holds"))
    _layout_options(commands.add_parser("layout", help="show, compare and diff parallel layouts"))
    _bench_options(commands.add_parser("bench", help="measure"))
    _doctor_options(commands.add_parser("doctor", help="what is here, and what is missing"))
    return parser


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=_generate)
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
    parser.add_argument("--trace", metavar="DIR", help="write a profile of the run (jax.profiler)")
    _cache_options(parser)
    _platform_options(parser)


def _cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache", metavar="DIR", help="compiled programs and step times (default: the user's)"
    )


def _cache(options: argparse.Namespace) -> Any:
    """The folder of --cache, and jax told to keep compiled programs in it; a folder that was set
    for jax otherwise stays."""
    from pathlib import Path

    import jax

    from deepinfer_jax.runtime import warmup

    folder = warmup.default_folder() if options.cache is None else Path(options.cache)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    return folder


def _platform_options(parser: argparse.ArgumentParser) -> None:
    device = parser.add_argument_group("device (default: jax decides)")
    device.add_argument("--platform", metavar="NAME", help="cpu, cuda, or a plugin's name")
    device.add_argument("--pjrt-plugin", metavar="PATH", help="library of the plugin so named")
    device.add_argument("--plugin-option", action="append", default=[], metavar="K=V")


def _platform_request(options: argparse.Namespace) -> Any:
    from deepinfer_jax.runtime import platform

    return platform.Request.parse(options.platform, options.pjrt_plugin, options.plugin_option)


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


def _generate(options: argparse.Namespace) -> int:
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

    from rich.console import Console

    from deepinfer_jax.config import Numerics
    from deepinfer_jax.runtime import offline, platform, terminal
    from deepinfer_jax.runtime.engine import LLM
    from deepinfer_jax.runtime.sampling_params import SamplingParams

    SamplingParams(**fields)  # refused before the model is read
    for notice in platform.ready(_platform_request(options)).notices:
        print(f"deepinfer-jax: {notice}", file=sys.stderr)
    llm = LLM(
        options.model,
        kernels=options.kernels,
        numerics=Numerics.preset(
            options.numerics, replay=options.replay, invariant=options.invariant
        ),
        max_slots=options.max_slots,
        max_context=options.max_context,
        speculate=_drafts(options.speculate),
        accept=options.accept,
        cache=_cache(options),
    )
    with terminal.traced(options.trace):
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
    from pathlib import Path

    return Path(path).read_text(encoding="utf-8")


def _chat_options(parser: argparse.ArgumentParser) -> None:
    from deepinfer_jax import chat

    def run(options: argparse.Namespace) -> int:
        return chat.run(options, _platform_request(options), _cache(options))

    parser.set_defaults(handler=run)
    chat.add_options(parser)
    _cache_options(parser)
    _platform_options(parser)


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=_inspect)
    parser.add_argument(
        "model", nargs="?", metavar="DIR", help="folder or Hub id; default: the demo"
    )
    parser.add_argument("--depth", type=int, default=3, help="levels of the tree to print")
    parser.add_argument("--json", action="store_true")


def _inspect(options: argparse.Namespace) -> int:
    from converters import inspect
    from deepinfer_jax import demo

    found = inspect.inspect(demo.checkpoint() if options.model is None else options.model)
    print(json.dumps(found.plain()) if options.json else found.text(options.depth))
    return 0


def _layout_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, count, text in (
        ("show", 1, "tree of parameters, placements and bytes"),
        ("compare", "+", "memory, collectives and modelled time side by side"),
        ("diff", 2, "what differs between two layouts"),
    ):
        action = actions.add_parser(name, help=text)
        action.set_defaults(handler=_layout)
        action.add_argument("layouts", nargs=count, metavar="LAYOUT", help="file or shipped name")
        action.add_argument("--model", default="v41-flash", help="config file or shipped name")
        action.add_argument("--axis", action="append", default=[], metavar="NAME=SIZE")
        if name == "show":
            action.add_argument("--depth", type=int, default=3)
        if name == "compare":
            action.add_argument("--devices", required=True, metavar="KINDxN", help="e.g. h200x64")
            action.add_argument("--batch", type=int, default=256, help="sequences, all devices")
            action.add_argument("--context", default="8k", help="tokens; 8k and 128k are read")
            action.add_argument("--phase", default="decode", choices=("decode", "prefill"))
            action.add_argument("--numerics", default="reference")
            action.add_argument("--json-to", metavar="DIR")
            action.add_argument("--png-to", metavar="FILE")


def _layout(options: argparse.Namespace) -> int:
    from rich.console import Console

    from deepinfer_jax import shipped
    from deepinfer_jax.config import ModelConfig, Numerics
    from deepinfer_jax.lab import commands
    from deepinfer_jax.runtime import priced

    console = Console()
    axes = {}
    for text in options.axis:
        name, _, size = text.partition("=")
        if not size.isdigit():
            raise ValueError(f"--axis {text}: expected NAME=SIZE")
        axes[name] = int(size)
    cfg = ModelConfig.from_json(shipped.find("models", options.model))
    layouts = commands.read(options.layouts, axes)

    def declared(layout: Any) -> Any:
        return priced.parameters(cfg, layout)

    if options.action == "show":
        return commands.show(layouts[0], declared, console, options.depth)
    if options.action == "diff":
        return commands.diff(layouts[0], layouts[1], declared, console)
    context = options.context.lower()
    tokens = int(context[:-1]) * 1024 if context.endswith("k") else int(context)
    numerics = Numerics.preset(options.numerics)

    def build(layout: Any) -> commands.Case:
        if options.phase == "prefill":
            program = priced.prefill(cfg, layout, numerics, batch=options.batch, context=tokens)
        else:
            program = priced.decode(cfg, layout, numerics, batch=options.batch, context=tokens)
        return commands.Case(
            program.function, program.args, priced.group, program.tokens, program.used
        )

    return commands.compare(
        layouts,
        build,
        declared,
        options.devices,
        console,
        json_to=options.json_to,
        png_to=options.png_to,
    )


def _bench_options(parser: argparse.ArgumentParser) -> None:
    from deepinfer_jax.bench import commands

    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    kernels = actions.add_parser("kernels", help="every kernel over its released shapes")
    kernels.set_defaults(handler=_bench_kernels)
    kernels.add_argument("--op", action="append", metavar="NAME", help="only this operation")
    kernels.add_argument("--runs", type=int, default=20)
    kernels.add_argument("--csv", metavar="FILE")
    kernels.add_argument("--png", metavar="FILE", help="roofline plot (plot extra)")
    decode = actions.add_parser("decode", help="tokens/s by batch size, cost of invariant=True")
    decode.set_defaults(handler=_bench_decode)
    decode.add_argument("--model", metavar="DIR", help="checkpoint folder; default: the demo")
    decode.add_argument("--batch", type=int, action="append", metavar="N", help="default: 1 and 32")
    decode.add_argument("--requests", type=int, default=32, help="of a run")
    decode.add_argument("--prompt", type=int, default=32, metavar="TOKENS")
    decode.add_argument("--tokens", type=int, default=128, help="generated by each request")
    decode.add_argument("--runs", type=int, default=3)
    decode.add_argument("--numerics", default="float32", help="reference, bf16 or float32")
    decode.add_argument("--speculate", metavar="K", help="draft tokens a step, 0: off, adaptive")
    decode.add_argument("--breakdown", action="store_true", help="time the device's steps too")
    decode.add_argument("--json", action="store_true")
    _cache_options(decode)
    commands.add_options(actions, _platform_options)


def _bench_decode(options: argparse.Namespace) -> int:
    from deepinfer_jax import demo
    from deepinfer_jax.config import Numerics
    from deepinfer_jax.runtime import bench

    load = bench.Load(options.requests, options.prompt, options.tokens, options.runs)
    rows = bench.decode(
        options.model or str(demo.checkpoint()),
        load,
        batches=options.batch or [1, 32],
        numerics=Numerics.preset(options.numerics),
        breakdown=options.breakdown,
        speculate=_drafts(options.speculate),
        cache=_cache(options),
    )
    return bench.report(rows, options.json)


def _drafts(text: str | None) -> int | str | None:
    """--speculate as `LLM` takes it."""
    return int(text) if text and text.isdigit() else text


def _bench_kernels(options: argparse.Namespace) -> int:
    from pallas_kernels import OPERATIONS, bench

    best = bench.ceilings()
    print(f"ceilings: {best.tflops:.0f} TFLOP/s, {best.tbs:.2f} TB/s")
    rows = []
    for row in bench.run(options.op or OPERATIONS, runs=options.runs, best=best):
        rows.append(row)
        print(row)
    if options.csv is not None:
        bench.write_csv(rows, options.csv)
    if options.png is not None:
        bench.plot_roofline(rows, best, options.png)
    return 0


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=_doctor)
    parser.add_argument("--json", action="store_true")
    _platform_options(parser)


def _doctor(options: argparse.Namespace) -> int:
    from deepinfer_jax.runtime import doctor

    report = doctor.examine(_platform_request(options))
    print(json.dumps(report.plain()) if options.json else report.text())
    return 0 if report.works else 1


if __name__ == "__main__":
    sys.exit(main())
