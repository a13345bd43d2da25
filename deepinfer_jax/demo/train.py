"""Trains the demo: `python -m deepinfer_jax.demo.train --work DIR`; resumes what it finds there.

Stages, each with its own learning-rate schedule, saved every few minutes (run.py):
  backbone   next-token cross-entropy; the last part of the time with the weights and caches as they
             will be stored (`stored.rounded`), so that the file is what was trained
  drafter    DSpark on the finished backbone: cross-entropy with the backbone's own distribution
             (drafting.py), stored weights throughout
  export     the official on-disk format (export.py)

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
from deepinfer_jax.demo.run import (
    SETUP,
    Flat,
    Run,
    cross_entropy,
    hashed,
    initial,
    prepared,
    stage,
)

MATRIX_RATE, RATE, TABLE_FACTOR = 0.02, 4e-3, 4.0
INDEX_SHARE = 0.2
BALANCE = 2e-3
MIX = {"bible": 7, "made": 1}  # the generated text is easy
STORED_FROM = 0.75


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def backbone_step(
    cfg: ModelConfig,
    use_stored: bool,
    params: Flat,
    state: optimiser.State,
    classes: Array,
    batch: Int32[Array, "b s1"],
    share: Array,
) -> tuple[Flat, optimiser.State, dict[str, Array]]:
    """One step; share: of the full learning rates."""
    tokens, target = batch[:, :-1], batch[:, 1:]
    rows = hashed(cfg, classes, tokens)

    def loss(params: Flat) -> tuple[Array, Any]:
        out = network.forward(
            SETUP(cfg), prepared(cfg, params, rows, use_stored), tokens, stored=use_stored
        )
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
        table_factor=TABLE_FACTOR,
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=45, help="of the backbone")
    parser.add_argument("--draft-minutes", type=float, default=12)
    parser.add_argument("--export", type=Path, help="folder to write the checkpoint to")
    options = parser.parse_args(arguments)
    run = Run(options.work, options.kjv, options.seed)
    cfg = run.cfg

    def backbone(use_stored: bool, params: Flat, state: Any, batch: np.ndarray, share: Array):
        return backbone_step(cfg, use_stored, params, state, run.classes, batch, share)

    def fresh() -> Flat:
        everything = initial(cfg, options.seed)
        return {name: v for name, v in everything.items() if not name.startswith("draft/")}

    params = stage(
        run, "backbone", fresh, MIX, backbone, options.minutes * 60, STORED_FROM, run.validate
    )
    trained = drafting.train(run, params, options.draft_minutes * 60)
    if options.export is not None:
        export.write(options.export, run.folder, cfg, {**params, **trained})
    return 0


if __name__ == "__main__":
    sys.exit(main())
