"""Draws the loss curve of a run: `python -m deepinfer_jax.demo.curve --work DIR --png FILE`.

Needs matplotlib (the plot extra).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--png", type=Path, required=True)
    options = parser.parse_args(arguments)
    text = (options.work / "log.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), width_ratios=(2, 1))
    backbone = [line for line in lines if line["stage"] == "backbone"]
    steps = [line for line in backbone if "loss" in line]
    axes[0].plot([x["step"] for x in steps], [x["loss"] for x in steps], label="training")
    checks = [line for line in backbone if "check" in line]
    for kind, name in (("bible", "held out: Bible"), ("made", "held out: generated")):
        axes[0].plot([x["step"] for x in checks], [x[kind] for x in checks], "o-", label=name)
    axes[0].set(xlabel="step", ylabel="nats a token", ylim=(0, 6.5), title="backbone")
    kept = min(checks, key=lambda x: x["bible"] + x["made"])["step"]
    axes[0].axvline(kept, color="grey", linestyle=":", label="kept")
    axes[0].legend(loc="upper right", fontsize="small")
    draft = [line for line in lines if line["stage"] == "drafter" and "greedy" in line]
    axes[1].plot([x["step"] for x in draft], [x["greedy"] for x in draft])
    axes[1].set(xlabel="step", ylabel="tokens a step (teacher-forced)", title="drafter")
    figure.tight_layout()
    figure.savefig(options.png, dpi=80)
    return 0


if __name__ == "__main__":
    sys.exit(main())
