"""The command line: `deepinfer-jax COMMAND --help`.

Commands import what they need when they run, so that `--help` and `convert` stay quick and need no
accelerator. Exit codes: 0 done, 1 done but something failed or does not fit, 2 refused, 130
interrupted from the keyboard; errors are one line each on stderr.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_jax.bench.values import positive
from deepinfer_jax.commands import generate, layout, traffic

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
    except (ValueError, OSError) as error:  # of the system too: a file not to be read, a full disk
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
    layout.add_options(commands.add_parser("layout", help="parallel layouts: placement and price"))
    _bench_options(commands.add_parser("bench", help="measure"))
    _doctor_options(commands.add_parser("doctor", help="what is here, and what is missing"))
    return parser


def _generate_options(parser: argparse.ArgumentParser) -> None:
    def run(options: argparse.Namespace) -> int:
        return generate.run(options, _platform_request(options), lambda: _cache(options))

    parser.set_defaults(handler=run)
    generate.add_options(parser)
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

    from deepinfer_jax.runtime import warmup

    return warmup.keep_programs(None if options.cache is None else Path(options.cache))


def _platform_options(parser: argparse.ArgumentParser) -> None:
    device = parser.add_argument_group("device (default: jax decides)")
    device.add_argument("--platform", metavar="NAME", help="cpu, cuda, or a plugin's name")
    device.add_argument("--pjrt-plugin", metavar="PATH", help="library of the plugin so named")
    device.add_argument("--plugin-option", action="append", default=[], metavar="K=V")


def _platform_request(options: argparse.Namespace) -> Any:
    from deepinfer_jax.runtime import platform

    return platform.Request.of(options)


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
    parser.add_argument("--layout", metavar="LAYOUT", help="file or shipped name: bytes a device")
    parser.add_argument("--axis", action="append", default=[], metavar="NAME=SIZE")
    parser.add_argument("--depth", type=positive, default=3, help="levels of the tree to print")
    parser.add_argument("--json", action="store_true")


def _inspect(options: argparse.Namespace) -> int:
    from converters import inspect
    from deepinfer_jax import demo
    from deepinfer_jax.lab.commands import read

    placed = None
    if options.layout is not None:
        (placed,) = read([options.layout], layout.sizes(options.axis))
    elif options.axis:
        raise ValueError("--axis: give --layout too")
    found = inspect.inspect(demo.checkpoint() if options.model is None else options.model, placed)
    print(json.dumps(found.plain()) if options.json else found.text(options.depth))
    return 0


def _bench_options(parser: argparse.ArgumentParser) -> None:
    from deepinfer_jax.bench import commands

    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    kernels = actions.add_parser("kernels", help="every kernel over its released shapes")
    kernels.set_defaults(handler=_bench_kernels)
    kernels.add_argument("--op", action="append", metavar="NAME", help="only this operation")
    kernels.add_argument("--runs", type=positive, default=20)
    kernels.add_argument("--csv", metavar="FILE")
    kernels.add_argument("--png", metavar="FILE", help="roofline plot (plot extra)")
    decode = actions.add_parser("decode", help="tokens/s by batch size, cost of invariant=True")
    decode.set_defaults(handler=_bench_decode)
    decode.add_argument("--model", metavar="DIR", help="checkpoint folder; default: the demo")
    decode.add_argument(
        "--batch", type=positive, action="append", metavar="N", help="default: 1 and 32"
    )
    decode.add_argument("--requests", type=positive, default=32, help="of a run")
    decode.add_argument("--prompt", type=positive, default=32, metavar="TOKENS")
    decode.add_argument("--tokens", type=positive, default=128, help="generated by each request")
    decode.add_argument("--runs", type=positive, default=3)
    decode.add_argument(
        "--ranks", type=positive, help="drawn weights: a rank's share of --model's config"
    )
    decode.add_argument(
        "--numerics", help="reference, bf16 or float32 (default; with --ranks: reference)"
    )
    decode.add_argument("--speculate", metavar="K", help="draft tokens a step, 0: off, adaptive")
    decode.add_argument("--breakdown", action="store_true", help="time the device's steps too")
    decode.add_argument("--json", action="store_true")
    _cache_options(decode)
    commands.add_options(actions, _platform_options)
    traffic.add_options(actions.add_parser("traffic", help="policies on a modelled clock"))


def _bench_decode(options: argparse.Namespace) -> int:
    from deepinfer_jax import demo, shipped
    from deepinfer_jax.bench import engines
    from deepinfer_jax.config import ModelConfig, Numerics
    from deepinfer_jax.runtime import bench

    cache = _cache(options)
    usual = "float32" if options.ranks is None else "reference"
    numerics = Numerics.preset(options.numerics or usual)
    if options.ranks is None:

        def model(numerics: Numerics) -> Any:
            return options.model or demo.checkpoint()

    else:
        cfg = ModelConfig.from_json(shipped.find("models", options.model or "v41-flash"))
        model = engines.rank_model(cfg, options.ranks, numerics).with_numerics
    rows = bench.decode(
        model,
        bench.Load(options.requests, options.prompt, options.tokens, options.runs),
        batches=options.batch or [1, 32],
        numerics=numerics,
        breakdown=options.breakdown,
        speculate=generate.drafts(options.speculate),
        cache=cache,
    )
    return bench.report(rows, options.json)


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
