"""`deepinfer-jax bench slice` and `bench plot`: options and what they run.

    bench slice prefill --tokens 4k,8k,16k,32k,64k --out prefill.jsonl
    bench slice decode --requests 16,64,128,256 --rows 1,3,6 --acceptance 0.8,0.7,0.6,0.5,0.4
    bench slice decode --layers 20,21 --requests 256 --rows 1
    bench slice decode --trace                                    (counts only, on any machine)
    bench plot prefill.jsonl decode.jsonl --png slices.png

Defaults are the released width and one rank of 64. On a CPU give a small model, such as
`--model v41-tiny --ranks 4`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

TOKENS = "4k,8k,16k,32k,64k"
REQUESTS = "16,32,64,128,256"


def add_options(actions: Any, device_options: Callable[[argparse.ArgumentParser], None]) -> None:
    """The parsers of `slice` and `plot` under `bench`."""
    parser = actions.add_parser("slice", help="layers, or one rank's share, at released width")
    parser.set_defaults(handler=_slice)
    parser.add_argument("phase", choices=("prefill", "decode"))
    parser.add_argument("--model", default="v41-flash", help="config file or shipped name")
    parser.add_argument("--layers", metavar="N,N", help="a layer slice of these layers")
    parser.add_argument("--ranks", type=int, default=64, help="of the expert-parallel group")
    parser.add_argument("--no-draft", action="store_true", help="no drafter in the step")
    parser.add_argument("--numerics", default="reference", help="reference, bf16 or float32")
    parser.add_argument("--replay", default="compact", help="prefill: full, mask or compact")
    parser.add_argument("--kernels", default="auto", help="auto, a name, or JSON {op: name}")
    parser.add_argument("--tokens", default=TOKENS, metavar="N,N", help="prefill: a step")
    parser.add_argument("--prompt", default="4k", metavar="N", help="prefill: longest prompt")
    parser.add_argument("--requests", default=REQUESTS, metavar="N,N", help="decode: at once")
    parser.add_argument("--rows", default="1,3,6", metavar="N,N", help="decode: of a request")
    parser.add_argument("--context", default="8k", metavar="N", help="decode: tokens a request")
    parser.add_argument("--acceptance", metavar="A,A", help="decode: shares of drafts that stand")
    parser.add_argument("--repeats", type=int, default=7, help="timed bursts")
    parser.add_argument("--burst", type=int, default=10, help="steps a burst")
    parser.add_argument("--side", type=int, default=8192, help="of the ceiling's matrices")
    parser.add_argument("--profile", metavar="DIR", help="profile a burst, report idle time")
    parser.add_argument("--trace", action="store_true", help="count only, run nothing")
    parser.add_argument("--out", metavar="F.jsonl", help="append the records")
    parser.add_argument("--json", action="store_true", help="print records as JSON lines")
    device_options(parser)
    plot = actions.add_parser("plot", help="pictures of recorded sweeps (plot extra)")
    plot.set_defaults(handler=_plot)
    plot.add_argument("files", nargs="+", metavar="F.jsonl")
    plot.add_argument("--png", required=True, metavar="FILE")


def _slice(options: argparse.Namespace) -> int:
    from deepinfer_jax import shipped
    from deepinfer_jax.bench import measure, sweeps
    from deepinfer_jax.config import ModelConfig, Numerics
    from deepinfer_jax.runtime import platform
    from pallas_kernels import Kernels

    decode = options.phase == "decode"
    replay = "full" if decode or options.layers is not None else options.replay
    part = sweeps.Part(
        ModelConfig.from_json(shipped.find("models", options.model)),
        Numerics.preset(options.numerics, replay=replay),
        None if options.layers is None else tuple(numbers("--layers", options.layers)),
        options.ranks,
        not options.no_draft,
        Kernels.parse(options.kernels),
    )
    points: Any
    profile = None if options.acceptance is None else shares(options.acceptance)
    if decode:
        widths = numbers("--rows", options.rows)
        (context,) = numbers("--context", options.context)
        requests = numbers("--requests", options.requests)
        points = sweeps.decode(part, requests, widths, context, profile)
    else:
        (prompt,) = numbers("--prompt", options.prompt)
        points = sweeps.prefill(part, numbers("--tokens", options.tokens), prompt)
    request = platform.Request.parse(options.platform, options.pjrt_plugin, options.plugin_option)
    for notice in platform.ready(request).notices:
        print(f"deepinfer-jax: {notice}", file=sys.stderr)
    common = {
        "command": sweeps.command(),
        "model": options.model,
        "acceptance": profile,
        "environment": measure.environment(),
    }
    if options.trace:
        return sweeps.report(
            sweeps.records(points, measure.trace, common), options.out, options.json
        )
    best = measure.ceilings(options.side, min(options.side**2 * 16, 1 << 30))

    def timed(one: Any) -> dict[str, Any]:
        return measure.run(
            one, best, repeats=options.repeats, burst=options.burst, profile=options.profile
        )

    return sweeps.report(sweeps.records(points, timed, common), options.out, options.json)


def _plot(options: argparse.Namespace) -> int:
    from deepinfer_jax.bench import plots, sweeps

    plots.draw(sweeps.read(options.files), options.png)
    return 0


def numbers(option: str, text: str) -> list[int]:
    """ "4k,100" -> [4096, 100]; raises ValueError naming the option."""
    found = []
    for part in text.lower().split(","):
        digits = part.strip().removesuffix("k")
        if not digits.isdigit():
            raise ValueError(f"{option} {text}: expected numbers such as 256 or 4k, with commas")
        found.append(int(digits) * (1024 if part.strip().endswith("k") else 1))
    return found


def shares(text: str) -> Sequence[float]:
    """ "0.8,0.5" -> [0.8, 0.5]; raises ValueError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= share <= 1 for share in found):
        raise ValueError(f"--acceptance {text}: expected shares between 0 and 1, with commas")
    return found
