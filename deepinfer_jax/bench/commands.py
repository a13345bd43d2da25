"""`deepinfer-jax bench slice`, `plot`, `prefill` and `idle`: options and what they run.

    bench slice prefill --tokens 4k,8k,16k,32k,64k --out prefill.jsonl
    bench slice decode --requests 16,64,128,256 --rows 1,3,6 --acceptance 0.8,0.7,0.6,0.5,0.4
    bench slice decode --layers 20,21 --requests 256 --rows 1
    bench slice decode --trace                                    (counts only, on any machine)
    bench plot prefill.jsonl decode.jsonl --png slices.png
    bench prefill --model DIR --tokens 512,2k --prompt 512        (the engine, a checkpoint)
    bench idle --ranks 64 --requests 256 --profile DIR            (the engine, drawn weights)

Defaults of slices are the released width and one rank of 64. On a CPU give a small model, such as
`--model v41-tiny --ranks 4`.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

from deepinfer_jax.bench.values import number, numbers, positive, shares

TOKENS = "4k,8k,16k,32k,64k"
REQUESTS = "16,32,64,128,256"


def add_options(actions: Any, device_options: Callable[[argparse.ArgumentParser], None]) -> None:
    """The parsers of `slice`, `plot`, `prefill` and `idle` under `bench`."""
    parser = actions.add_parser("slice", help="layers, or one rank's share, at released width")
    parser.set_defaults(handler=_slice)
    parser.add_argument("phase", choices=("prefill", "decode"))
    parser.add_argument("--model", default="v41-flash", help="config file or shipped name")
    parser.add_argument("--layers", metavar="N,N", help="a layer slice of these layers")
    parser.add_argument("--ranks", type=positive, default=64, help="of the expert-parallel group")
    parser.add_argument("--no-draft", action="store_true", help="no drafter in the step")
    parser.add_argument("--numerics", default="reference", help="reference, bf16 or float32")
    parser.add_argument("--invariant", action="store_true", help="same bits for any row count")
    parser.add_argument("--replay", default="compact", help="prefill: full, mask or compact")
    parser.add_argument("--kernels", default="auto", help="auto, a name, or JSON {op: name}")
    parser.add_argument("--tokens", default=TOKENS, metavar="N,N", help="prefill: a step")
    parser.add_argument("--prompt", default="4k", metavar="N", help="prefill: longest prompt")
    parser.add_argument("--requests", default=REQUESTS, metavar="N,N", help="decode: at once")
    parser.add_argument("--rows", default="1,3,6", metavar="N,N", help="decode: of a request")
    parser.add_argument("--context", default="8k", metavar="N", help="decode: tokens a request")
    parser.add_argument("--acceptance", metavar="A,A", help="decode: shares of drafts that stand")
    parser.add_argument("--repeats", type=positive, default=7, help="timed bursts")
    parser.add_argument("--burst", type=positive, default=10, help="steps a burst")
    parser.add_argument("--side", type=positive, default=8192, help="of the ceiling's matrices")
    parser.add_argument(
        "--profile", metavar="DIR", help="profile a burst: idle time; records rank its kernels"
    )
    parser.add_argument(
        "--jobs", type=positive, metavar="N", help="compile N points at a time, then run each alone"
    )
    parser.add_argument("--trace", action="store_true", help="count only, run nothing")
    parser.add_argument("--out", metavar="F.jsonl", help="append the records")
    parser.add_argument("--json", action="store_true", help="print records as JSON lines")
    device_options(parser)
    plot = actions.add_parser("plot", help="pictures of recorded sweeps (plot extra)")
    plot.set_defaults(handler=_plot)
    plot.add_argument("files", nargs="+", metavar="F.jsonl")
    plot.add_argument("--png", required=True, metavar="FILE")
    prefill = actions.add_parser("prefill", help="prompt tokens/s of the engine by step size")
    prefill.set_defaults(handler=_prefill)
    prefill.add_argument("--model", metavar="DIR", help="checkpoint folder; default: the demo")
    prefill.add_argument("--tokens", default="128,512", metavar="N,N", help="a step")
    prefill.add_argument("--prompt", default="128", metavar="N", help="tokens of a prompt")
    prefill.add_argument("--requests", type=positive, default=32, help="of a run")
    prefill.add_argument("--runs", type=positive, default=3)
    idle = actions.add_parser("idle", help="device idle time between the engine's decode steps")
    idle.set_defaults(handler=_idle)
    idle.add_argument("--model", metavar="DIR", help="checkpoint folder; default: the demo")
    idle.add_argument(
        "--ranks", type=positive, help="drawn weights: a rank's share of --model's config"
    )
    idle.add_argument("--requests", type=positive, default=256, help="at once")
    idle.add_argument("--prompt", default="128", metavar="N", help="tokens of a prompt")
    idle.add_argument("--context", default="1k", metavar="N", help="room a request has")
    idle.add_argument("--steps", type=positive, default=50, help="decode steps to profile")
    idle.add_argument("--speculate", type=int, metavar="K", help="draft tokens a step, 0: off")
    idle.add_argument("--profile", required=True, metavar="DIR", help="where the profile goes")
    for one in (prefill, idle):
        one.add_argument("--numerics", default="reference", help="reference, bf16 or float32")
        one.add_argument("--replay", default="full", help="full, mask or compact")
        one.add_argument("--kernels", default="auto", help="auto, a name, or JSON {op: name}")
        one.add_argument("--out", metavar="F.jsonl", help="append the records")
        one.add_argument("--json", action="store_true", help="print records as JSON lines")
        device_options(one)


def _slice(options: argparse.Namespace) -> int:
    from deepinfer_jax import shipped
    from deepinfer_jax.bench import measure, sweeps, together
    from deepinfer_jax.config import ModelConfig, Numerics
    from deepinfer_jax.runtime import platform
    from pallas_kernels import Kernels

    decode = options.phase == "decode"
    replay = "full" if decode or options.layers is not None else options.replay
    part = sweeps.Part(
        ModelConfig.from_json(shipped.find("models", options.model)),
        Numerics.preset(options.numerics, replay=replay, invariant=options.invariant),
        None if options.layers is None else tuple(numbers("--layers", options.layers, 0)),
        options.ranks,
        not options.no_draft,
        Kernels.parse(options.kernels),
    )
    points: Iterable[sweeps.Point]
    profile = None if options.acceptance is None else shares(options.acceptance)
    if decode:
        widths = numbers("--rows", options.rows)
        context = number("--context", options.context)
        requests = numbers("--requests", options.requests)
        points = sweeps.decode(part, requests, widths, context, profile)
    else:
        prompt = number("--prompt", options.prompt)
        points = sweeps.prefill(part, numbers("--tokens", options.tokens), prompt)
    if options.jobs is not None and options.trace:
        raise ValueError("--jobs: --trace compiles nothing")
    common = _started(options) | {"model": options.model, "acceptance": profile}
    timing = measure.Timing(options.repeats, options.burst, options.side, options.profile)
    if options.trace:
        found = sweeps.measured(points, lambda point: measure.trace(point.slice()))
    elif options.jobs is not None:
        request = platform.Request.of(options)
        found = together.measured(points, options.jobs, request, timing)
    else:
        best = timing.ceilings()

        def timed(point: sweeps.Point) -> dict[str, Any]:
            return measure.run(measure.prepare(point.slice()), best, timing)

        found = sweeps.measured(points, timed)
    return sweeps.report(sweeps.records(found, common), options.out, options.json)


def _plot(options: argparse.Namespace) -> int:
    from deepinfer_jax.bench import plots, sweeps

    plots.draw(sweeps.read(options.files), options.png)
    return 0


def _prefill(options: argparse.Namespace) -> int:
    import functools

    from deepinfer_jax import demo
    from deepinfer_jax.bench import engines, sweeps
    from deepinfer_jax.config import Numerics
    from deepinfer_jax.runtime.engine import LLM

    width = number("--prompt", options.prompt)
    shapes = [(count // width, width) for count in numbers("--tokens", options.tokens)]
    if not all(sequences for sequences, _ in shapes):
        raise ValueError(f"--tokens {options.tokens}: expected at least one prompt of {width}")
    common = _started(options) | {"model": options.model}
    llm_of = functools.partial(
        LLM,
        options.model or demo.checkpoint(),
        kernels=options.kernels,
        numerics=Numerics.preset(options.numerics, replay=options.replay),
    )
    rows = engines.prefill(llm_of, shapes, options.requests, options.runs)
    return sweeps.report((common | row for row in rows), options.out, options.json)


def _idle(options: argparse.Namespace) -> int:
    from deepinfer_jax import demo, shipped
    from deepinfer_jax.bench import engines, sweeps
    from deepinfer_jax.config import ModelConfig, Numerics
    from deepinfer_jax.runtime.engine import LLM, Shapes
    from pallas_kernels import Kernels

    prompt = number("--prompt", options.prompt)
    context = number("--context", options.context)
    numerics = Numerics.preset(options.numerics, replay=options.replay)
    common = _started(options) | {"model": options.model, "ranks": options.ranks}
    source: Any = options.model or demo.checkpoint()
    if options.ranks is not None:
        cfg = ModelConfig.from_json(shipped.find("models", options.model or "v41-flash"))
        kernels = Kernels.parse(options.kernels)
        source = engines.rank_model(cfg, options.ranks, numerics, kernels)
    llm = LLM(
        source,
        kernels=options.kernels,
        numerics=numerics,
        max_slots=options.requests,
        max_context=context,
        speculate=options.speculate,
        shapes=Shapes(
            prefill=((min(8, options.requests), prompt),),
            pages=engines.enough_pages(options.requests, context),
        ),
    )
    found = engines.idle_between_steps(llm, prompt, options.steps, options.profile)
    name = f"engine decode, {options.requests} requests"
    return sweeps.report([{"name": name, **common, **found}], options.out, options.json)


def _started(options: argparse.Namespace) -> dict[str, Any]:
    """The device settled; what every record says."""
    from deepinfer_jax.bench import measure, sweeps
    from deepinfer_jax.runtime import platform

    for notice in platform.ready(platform.Request.of(options)).notices:
        print(f"deepinfer-jax: {notice}", file=sys.stderr)
    return {"command": sweeps.command(), "environment": measure.environment()}
