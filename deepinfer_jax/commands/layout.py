"""`deepinfer-jax layout`: where parameters go, what a layout costs, what differs."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from deepinfer_jax.bench.values import natural, number, positive

COMPILE_SECONDS = 3600.0
TABLE_WIDTH = 240


def add_options(parser: argparse.ArgumentParser) -> None:
    """The actions of the command and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _balance_options(actions.add_parser("balance", help="replay recorded expert counts (EPLB)"))
    for name, count, text in (
        ("show", 1, "tree of parameters, placements and bytes"),
        ("compare", "+", "memory, collectives and modelled time side by side"),
        ("diff", 2, "what differs between two layouts"),
    ):
        action = actions.add_parser(name, help=text)
        action.set_defaults(handler=run)
        action.add_argument("layouts", nargs=count, metavar="LAYOUT", help="file or shipped name")
        action.add_argument("--model", default="v41-flash", help="config file or shipped name")
        action.add_argument("--axis", action="append", default=[], metavar="NAME=SIZE")
        if name == "show":
            action.add_argument("--depth", type=positive, default=3)
        if name == "compare":
            action.add_argument("--devices", required=True, metavar="KINDxN", help="e.g. h200x64")
            action.add_argument(
                "--batch", type=positive, default=256, help="sequences, all devices"
            )
            action.add_argument("--context", default="8k", help="tokens; 8k and 128k are read")
            action.add_argument("--phase", default="decode", choices=("decode", "prefill"))
            action.add_argument("--numerics", default="reference")
            action.add_argument(
                "--compile",
                choices=("cpu", "gpu"),
                help="read collectives from the compiled program: for simulated CPU devices, or "
                "for the GPUs of --devices without having one (aot extra)",
            )
            action.add_argument("--json-to", metavar="DIR")
            action.add_argument("--png-to", metavar="FILE")


def _balance_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=_balance)
    parser.add_argument("trace", metavar="F.npz", help="of `generate --record-experts F.npz`")
    parser.add_argument(
        "--shards", type=positive, required=True, help="devices that hold the experts"
    )
    parser.add_argument("--spare", type=natural, default=0, help="slots for replicas, all shards")
    parser.add_argument(
        "--interval", type=positive, default=100, help="steps between two placements"
    )
    parser.add_argument(
        "--window", type=positive, default=100, help="steps a placement is chosen from"
    )
    parser.add_argument("--json", action="store_true")


def _balance(options: argparse.Namespace) -> int:
    """Replays a recorded trace under every policy, layer by layer and summed over them."""
    from rich.console import Console
    from rich.table import Table

    from deepinfer_jax.runtime import eplb, experts

    given = {name: getattr(options, name) for name in ("shards", "spare", "interval", "window")}
    layers = {
        layer: eplb.replay(trace, **given) for layer, trace in experts.load(options.trace).items()
    }
    if options.json:
        print(json.dumps({"options": given, "layers": layers}))
        return 0
    table = Table(title="tokens on the slowest shard, summed over steps")
    for name in ("layer", *eplb.POLICIES, "perfect balance", "slots moved"):
        table.add_column(name, justify="right")
    total = dict.fromkeys((*eplb.POLICIES, "ideal", "moved"), 0.0)
    for layer, found in layers.items():
        row = {policy: found[policy]["cost"] for policy in eplb.POLICIES}
        row |= {"ideal": found["none"]["ideal"], "moved": found["sum_of_max"]["moved"]}
        total = {name: total[name] + value for name, value in row.items()}
        table.add_row(str(layer), *(f"{value:,.0f}" for value in row.values()))
    table.add_section()
    table.add_row("all", *(f"{value:,.0f}" for value in total.values()))
    Console().print(table)
    return 0


def run(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    from rich.console import Console

    from deepinfer_jax import shipped
    from deepinfer_jax.config import ModelConfig, Numerics
    from deepinfer_jax.lab import commands, devices, simulate
    from deepinfer_jax.layout import PHASES
    from deepinfer_jax.model import parallel
    from deepinfer_jax.runtime import priced

    console = Console()
    if not console.is_terminal:  # a table in a file is as wide as it must be
        console = Console(width=TABLE_WIDTH)
    model = shipped.find("models", options.model)
    cfg = ModelConfig.from_json(model)
    layouts = commands.read(options.layouts, sizes(options.axis))
    by_name = dict(zip((layout.name for layout in layouts), options.layouts, strict=True))

    def declared(layout: Any) -> Any:
        return priced.parameters(cfg, layout)

    if options.action == "show":
        for phase in PHASES:
            parallel.check(layouts[0], cfg, phase)
        return commands.show(layouts[0], declared, console, options.depth)
    if options.action == "diff":
        return commands.diff(layouts[0], layouts[1], declared, console)
    tokens = number("--context", options.context)
    numerics = Numerics.preset(options.numerics)

    def build(layout: Any) -> commands.Case:
        if options.phase == "prefill":
            program = priced.prefill(cfg, layout, numerics, batch=options.batch, context=tokens)
        else:
            program = priced.decode(cfg, layout, numerics, batch=options.batch, context=tokens)
        return commands.Case(
            program.function, program.args, priced.group, program.tokens, program.used
        )

    def compiled(layout: Any) -> simulate.Compiled:
        target = {
            "model": str(model),
            "layout": str(shipped.find("layouts", by_name[layout.name])),
            "axes": dict(layout.axes),
            "phase": options.phase,
            "batch": options.batch,
            "context": tokens,
            "numerics": options.numerics,
            "ragged": options.compile == "gpu",
        }
        gpu = devices.parse(options.devices)[0] if options.compile == "gpu" else None
        name = f"{priced.__name__}:{priced.target.__name__}"
        return simulate.in_child(name, target, layout.size, gpu, timeout=COMPILE_SECONDS)

    return commands.compare(
        layouts,
        build,
        declared,
        options.devices,
        console,
        json_to=options.json_to,
        png_to=options.png_to,
        compiled=compiled if options.compile else None,
    )


def sizes(texts: Sequence[str]) -> dict[str, int]:
    """--axis NAME=SIZE, given repeatedly."""
    axes = {}
    for text in texts:
        name, _, size = text.partition("=")
        if not size.isdigit():
            raise ValueError(f"--axis {text}: expected NAME=SIZE")
        axes[name] = int(size)
    return axes
