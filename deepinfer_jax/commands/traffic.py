"""`deepinfer-jax bench traffic`: scheduling policies compared on a modelled clock.

bench traffic --rate 40 --texts 8 --shared 2k --policy 4:4 --policy 4:4:prefix --png t.png
bench traffic --replicas 4 --rate 80 --texts 64 --shared 2k --policy 4:4:prefix:turns
"""

import argparse
import json

from deepinfer_jax.bench.values import natural, number, positive, positive_real, shares

POLICIES = ("4:4", "4:4:prefix", "16:1", "1:16")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.set_defaults(handler=run)
    parser.add_argument("--model", default="v41-flash", help="config file or shipped name")
    parser.add_argument("--devices", default="h200", help="kind, from configs/devices.toml")
    parser.add_argument("--ranks", type=positive, default=64, help="of the expert-parallel group")
    parser.add_argument(
        "--efficiency", type=positive_real, default=0.5, help="share of the peaks reached"
    )
    parser.add_argument("--requests", type=positive, default=500)
    parser.add_argument("--rate", type=positive_real, default=20.0, help="requests a second")
    parser.add_argument("--prompt", default="1k", metavar="N", help="mean tokens of a prompt's own")
    parser.add_argument("--new", default="200", metavar="N", help="mean tokens to make")
    parser.add_argument("--texts", type=natural, default=0, help="texts that prompts begin with")
    parser.add_argument("--shared", default="0", metavar="N", help="tokens of such a text")
    parser.add_argument("--slots", type=positive, default=128)
    parser.add_argument(
        "--pages", type=positive, help="of 128 tokens (default: enough for all slots)"
    )
    parser.add_argument("--acceptance", metavar="A,A", help="shares of drafts that stand")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--policy",
        action="append",
        metavar="P:D[:prefix][:ROUTE]",
        help="prefill and decode steps in a row, with a prefix cache or without, and how requests "
        "are spread over replicas (warm, short, turns); may be repeated",
    )
    parser.add_argument(
        "--replicas", type=positive, default=1, help="of such groups, with slots each"
    )
    parser.add_argument("--json", action="store_true", help="print records as JSON lines")
    parser.add_argument("--png", metavar="FILE", help="distributions of the times")


def run(options: argparse.Namespace) -> int:
    """Every policy through the same trace."""
    from deepinfer_jax import shipped
    from deepinfer_jax.bench import traffic
    from deepinfer_jax.config import ModelConfig
    from deepinfer_jax.lab import devices

    prompt, new = number("--prompt", options.prompt), number("--new", options.new)
    shared = number("--shared", options.shared, least=0)
    cfg = ModelConfig.from_json(shipped.find("models", options.model))
    device, _ = devices.parse(options.devices)
    clock = traffic.Clock(cfg, device, options.ranks, options.efficiency)
    trace = traffic.poisson(
        options.requests,
        options.rate,
        prompt=prompt,
        new=new,
        texts=options.texts,
        shared=shared,
        seed=options.seed,
    )
    profile = () if options.acceptance is None else shares(options.acceptance)
    conditions = {name: value for name, value in vars(options).items() if name != "handler"}
    results = {}
    for text in options.policy or POLICIES:
        results[text] = traffic.compare(
            trace,
            text,
            clock,
            slots=options.slots,
            pages=options.pages,
            acceptance=profile,
            replicas=options.replicas,
        )
    for text, result in results.items():
        found = {name: round(value, 4) for name, value in result.summary().items()}
        if options.json:
            print(json.dumps({**conditions, "policy": text, **found}))
        else:
            print(f"{text:16s} " + "  ".join(f"{name} {value}" for name, value in found.items()))
    if options.png is not None:
        traffic.draw(results, options.png)
    return 0
