"""What both trainings share: weights by path, the run's folder, and a timed stage.

Weights are a flat dictionary, path -> float32 array of the logical shape; `prepared` makes of it
the tree that the model's functions take. A stage runs for a time, saves itself, and goes on where
it was when it is called again.
"""

import functools
import json
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array, Float, Int32

from converters.token_map import token_map
from deepinfer_jax import spec
from deepinfer_jax.config import ModelConfig, Numerics
from deepinfer_jax.demo import corpus, network, optimiser, shape, stored
from deepinfer_jax.model import engram_hash, transformer
from deepinfer_jax.model.setup import Setup

LENGTH = 256  # tokens of a sequence
BATCH = 8  # sequences of a step
KINDS = "bible", "made"
SETUP = functools.partial(
    Setup, numerics=Numerics(compute="float32", act_quant=False, cache_qdq=False)
)
Flat = dict[str, Array]


def declared(cfg: ModelConfig) -> dict[str, Any]:
    """Every weight by its path, quantised pairs as one."""
    tree = transformer.abstract(cfg)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stored.is_weight)
    return {spec.path_name(path): leaf for path, leaf in leaves}


def tree_of(cfg: ModelConfig, flat: Any) -> transformer.Weights:
    """The weights tree with these leaves."""
    tree = transformer.abstract(cfg)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stored.is_weight)
    return jax.tree.unflatten(structure, [flat[spec.path_name(path)] for path, _ in leaves])


def initial(cfg: ModelConfig, seed: int) -> Flat:
    """Random float32 weights."""
    rng = np.random.default_rng(seed)
    found: Flat = {}
    for name, leaf in declared(cfg).items():
        size, last = stored.logical_shape(leaf), name.split("/")[-1]
        drawn = rng.standard_normal(size, dtype=np.float32)
        if last.endswith("norm") or last in ("q_weight", "k_weight"):
            value = np.ones(size, np.float32)
        elif last in ("bias", "bias_vl", "sink", "confidence", "head"):
            value = np.zeros(size, np.float32)
        elif "hc_" in name:
            value = _mixes(cfg, last, drawn)
        elif last in ("embed", "markov_embed"):
            value = drawn * np.float32(0.3)
        elif last == "table":
            value = drawn * np.float32(0.02)
        elif last == "markov_head":
            value = drawn * np.float32(0.01)
        else:
            value = drawn * np.float32(size[-1] ** -0.5)
        found[name] = jnp.asarray(value)
    return found


def _mixes(cfg: ModelConfig, last: str, drawn: np.ndarray) -> np.ndarray:
    """mHC starts near a plain residual: streams mixed little, written to and read evenly."""
    n = cfg.hc_mult
    if last == "fn":
        return drawn * np.float32(0.02)
    if last == "scale":
        return np.full(drawn.shape, 0.5, np.float32)
    base = np.zeros(drawn.shape, np.float32)
    base[:n] = -np.log(n - 1.0)  # sigmoid = 1 / n
    base[2 * n :] = (4.0 * np.eye(n)).reshape(-1)
    return base


def prepared(
    cfg: ModelConfig, params: Flat, rows: dict[int, Array], use_stored: bool
) -> transformer.Weights:
    """The tree for `network.forward`: tables as read rows, weights as stored if asked."""
    leaves = declared(cfg)
    used: dict[str, Any] = {}
    for name, value in params.items():
        how = stored.kind(leaves[name])
        if name.endswith("table"):
            value = value[rows[int(name.split("/")[1])]]
        used[name] = stored.rounded(value, how) if use_stored else value
    return tree_of(cfg, {name: used.get(name) for name in leaves})


def hashed(cfg: ModelConfig, classes: Array, tokens: Int32[Array, "b s"]) -> dict[int, Array]:
    """Engram rows of whole sequences."""
    rows, empty = network.rows_of(SETUP(cfg), tokens)
    return engram_hash.table_rows(cfg, classes, rows, empty)[0]


def cross_entropy(
    logits: Float[Array, "b s v"], target: Int32[Array, "b s"]
) -> Float[Array, "b s"]:
    """Nats of each target."""
    chosen = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == target[..., None], logits, 0.0), -1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@functools.partial(jax.jit, static_argnums=(0, 1))
def validation(
    cfg: ModelConfig, use_stored: bool, params: Flat, classes: Array, batch: Int32[Array, "b s"]
) -> Float[Array, ""]:
    """Mean nats of all tokens but the first."""
    tokens = batch[:, :-1]
    weights = prepared(cfg, params, hashed(cfg, classes, tokens), use_stored)
    out = network.forward(SETUP(cfg), weights, tokens, stored=use_stored)
    return jnp.mean(cross_entropy(out.logits, batch[:, 1:]))


class Run:
    """A training folder: tokenizer, streams, newest state, log."""

    def __init__(self, folder: Path, kjv: Path | None, seed: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.seed = folder, seed
        if not (folder / "streams.npz").exists():
            self._prepare(kjv)
        tokens = np.load(folder / "streams.npz")
        self.train = {kind: tokens[kind] for kind in KINDS}
        self.held_out = {kind: tokens[f"held_out_{kind}"] for kind in KINDS}
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.cfg = ModelConfig.from_hf(config)
        self.classes = jnp.asarray(token_map(folder / "tokenizer.json", shape.VOCAB))

    def _prepare(self, kjv: Path | None) -> None:
        found = corpus.documents(kjv, self.seed)
        some = found.train["bible"] + found.train["made"][:6000]
        made: tokenizers.Tokenizer = corpus.train_tokenizer(some, shape.VOCAB)
        corpus.write_tokenizer(made, self.folder)
        classes = int(token_map(self.folder / "tokenizer.json", shape.VOCAB).max()) + 1
        text = json.dumps(shape.hf_config(classes), indent=2)
        (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")
        streams = {
            kind: corpus.stream(made, texts, self.seed) for kind, texts in found.train.items()
        }
        for kind, texts in found.held_out.items():
            streams[f"held_out_{kind}"] = corpus.stream(made, texts, self.seed)
        np.savez(str(self.folder / "streams.npz"), allow_pickle=False, **streams)

    def save(self, name: str, content: Any) -> None:
        """Atomically."""
        file = self.folder / f"{name}.pkl"
        file.with_suffix(".part").write_bytes(pickle.dumps(jax.device_get(content)))
        file.with_suffix(".part").replace(file)

    def load(self, name: str) -> Any:
        file = self.folder / f"{name}.pkl"
        return pickle.loads(file.read_bytes()) if file.exists() else None

    def log(self, **fields: Any) -> None:
        line = {k: round(float(v), 4) if not isinstance(v, str) else v for k, v in fields.items()}
        print(json.dumps(line), flush=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def validate(self, params: Flat, use_stored: bool, most: int = 16) -> dict[str, float]:
        """Held-out nats by kind, over at most `most` windows of each."""
        found = {}
        for kind, ids in self.held_out.items():
            cut = corpus.windows(ids, LENGTH + 1)[:most]
            parts = [cut[i : i + BATCH] for i in range(0, len(cut) - BATCH + 1, BATCH)]
            nats = [validation(self.cfg, use_stored, params, self.classes, p) for p in parts]
            found[kind] = float(np.mean([float(n) for n in nats]))
        return found


def rate_share(done: float) -> float:
    """Of the full learning rate, by the share of the stage that is done: up, flat, down to 0."""
    return min(1.0, done / 0.02 + 0.02) * min(1.0, max(0.0, (1.0 - done) / 0.6))


def stage(
    run: Run,
    name: str,
    fresh: Callable[[], Flat],
    mix: Mapping[str, int],
    step: Callable[[bool, Flat, Any, np.ndarray, Array], tuple[Flat, Any, dict[str, Array]]],
    seconds: float,
    stored_from: float,
    check: Callable[[Flat, bool], dict[str, float]],
) -> Flat:
    """Runs a stage for `seconds` of wall clock in all, over however many calls; the last part, from
    the share `stored_from` on, with stored weights. mix: sequences of each kind, BATCH in all."""
    saved = run.load(name)
    if saved is None:
        params = fresh()
        state, used, number = optimiser.start(params), 0.0, 0
    else:
        params, state, used, number = saved
        params = jax.tree.map(jnp.asarray, params)
        state = jax.tree.map(jnp.asarray, state)
    if used >= seconds:
        return params
    source: Iterator[np.ndarray] = corpus.batches(run.train, run.seed + number, mix, LENGTH)
    begin, shown, kept = time.monotonic() - used, time.monotonic(), time.monotonic()
    losses: list[float] = []
    while used < seconds:
        now_stored = used / seconds >= stored_from
        share = jnp.float32(rate_share(used / seconds))
        params, state, found = step(now_stored, params, state, next(source), share)
        losses.append(float(found["loss"]))
        number, now = number + 1, time.monotonic()
        used = now - begin
        if now - shown > 20 or number in (1, 2, 5, 20):
            shown = now
            values = {k: v for k, v in found.items() if k != "loss"}
            run.log(
                stage=name,
                step=number,
                tokens=number * BATCH * LENGTH,
                seconds=used,
                stored=now_stored,
                loss=float(np.mean(losses)),
                **values,
            )
            losses = []
        if now - kept > 180 or used >= seconds:
            kept = now
            run.save(name, (params, state, used, number))
            marks = check(params, now_stored)
            run.log(stage=name, step=number, seconds=used, check=1, **marks)
            begin += time.monotonic() - now  # checks do not count
    return params
