"""Trains the demo: `python -m deepinfer_jax.demo.train --work DIR`; resumes what it finds there.

Stages, each with its own learning-rate schedule, saved every few minutes (run.py):
  backbone   next-token cross-entropy, weights and caches as they will be stored (`stored.rounded`),
             so that the file is what was trained; dropout, most of all on Engram rows
  drafter    DSpark on the finished backbone: cross-entropy with the backbone's own distribution
             (drafting.py), stored weights throughout; begun anew when the backbone has changed
  export     the official on-disk format (export.py), at every save: a run that is cut off has left
             its best so far

The schedules follow the wall clock, so `--batch` and `--steps` are the machine's to choose. A
machine without network takes `--corpus`, the folder of a run made elsewhere with `--minutes 0
--draft-minutes 0`.

A log line has step, tokens, seconds, loss; `curve.py` draws it.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.demo import drafting, export, network, optimiser
from deepinfer_jax.demo.dropout import Dropout
from deepinfer_jax.demo.run import (
    SETUP,
    Flat,
    Found,
    Run,
    compiled,
    cross_entropy,
    hashed,
    initial,
    prepared,
    several,
    stage,
)

MATRIX_RATE, RATE = 0.02, 3e-3
DROPPED, ROWS_DROPPED = 0.3, 0.5
INDEX_SHARE = 0.2
BALANCE = 2e-3
BIBLE = 0.75  # the generated text is easy


@functools.partial(compiled, static_argnums=0, donate_argnums=(1, 2))
def backbone_steps(
    cfg: ModelConfig,
    params: Flat,
    state: optimiser.State,
    classes: Array,
    batches: Int32[Array, "steps b s1"],
    key: Array,
    share: Array,
) -> tuple[Flat, optimiser.State, Found]:
    """Several steps; share: of the full learning rates."""
    one = functools.partial(backbone_step, cfg, classes, share)
    return several(one, params, state, batches, key)


def backbone_step(
    cfg: ModelConfig,
    classes: Array,
    share: Array,
    params: Flat,
    state: optimiser.State,
    batch: Int32[Array, "b s1"],
    key: Array,
) -> tuple[Flat, optimiser.State, Found]:
    """One step."""
    tokens, target = batch[:, :-1], batch[:, 1:]
    rows = hashed(cfg, classes, tokens)

    def loss(params: Flat) -> tuple[Array, Any]:
        drop = Dropout(key, DROPPED, ROWS_DROPPED)
        weights = prepared(cfg, params, rows, drop)
        out = network.forward(SETUP(cfg), weights, tokens, stored=True, drop=drop)
        nats = jnp.mean(cross_entropy(out.logits, target))
        return nats + INDEX_SHARE * out.index_loss, (nats, out.index_loss, out.loads)

    (_, (nats, index, loads)), grads = jax.value_and_grad(loss, has_aux=True)(params)
    grads, norm = optimiser.clip(grads, 1.0)
    new, state = optimiser.update(
        params,
        grads,
        state,
        matrix_rate=MATRIX_RATE * share,
        rate=RATE * share,
    )
    for layer, load in enumerate(loads):
        name = f"layers/{layer}/ffn/bias"
        new[name] = params[name] + BALANCE * jnp.sign(jnp.mean(load) - load)
    most = jnp.stack([jnp.max(load) / jnp.mean(load) for load in loads]).max()
    return new, state, {"loss": nats, "index": index, "norm": norm, "load": most}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--work", type=Path, required=True, help="folder of the run; resumed")
    parser.add_argument("--kjv", type=Path, help="the Bible as printed; default: fetch it")
    parser.add_argument("--corpus", type=Path, help="folder of another run: its text as tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--steps", type=int, default=16, help="steps a call of the device")
    parser.add_argument("--minutes", type=float, default=45, help="of the backbone")
    parser.add_argument("--draft-minutes", type=float, default=12)
    parser.add_argument("--export", type=Path, help="folder to write the checkpoint to")
    options = parser.parse_args(arguments)
    run = Run(
        options.work,
        options.kjv,
        options.seed,
        ready=options.corpus,
        batch=options.batch,
        steps=options.steps,
    )
    cfg, everything = run.cfg, initial(run.cfg, options.seed)

    def backbone(params: Flat, state: Any, batches: np.ndarray, key: Array, share: Array):
        return backbone_steps(cfg, params, state, run.classes, batches, key, share)

    def fresh() -> Flat:
        return {name: v for name, v in everything.items() if not name.startswith("draft/")}

    def keep(params: Flat) -> None:
        if options.export is not None:
            export.write(options.export, run.folder, cfg, {**everything, **params})

    seconds = options.minutes * 60
    best = stage(run, "backbone", fresh, BIBLE, backbone, seconds, run.validate, keep)
    everything |= best
    keep(drafting.train(run, best, options.draft_minutes * 60, keep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
