"""What both trainings share: weights by path, the run's folder, and a timed stage.

Weights are a flat dictionary, path -> float32 array of the logical shape; `prepared` makes of it
the tree that the model's functions take, rounded as the file stores them. A stage runs for a time,
several steps a call of the device (`several`), saves itself, and goes on where it was when it is
called again.
"""

import functools
import hashlib
import json
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
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
from deepinfer_jax.demo.dropout import Dropout
from deepinfer_jax.model import engram_hash, transformer
from deepinfer_jax.model.compile import COMPILER_OPTIONS
from deepinfer_jax.model.setup import Setup
from pallas_kernels import Kernels

LENGTH = 1024  # tokens of a sequence
CHECKED = 8  # windows of a validation call
KINDS = "bible", "made"
SETUP = functools.partial(
    Setup,
    numerics=Numerics(compute="float32", act_quant=False, cache_qdq=False),
    kernels=Kernels.parse("reference"),  # the others have no gradient
)
Flat = dict[str, Array]
Found = dict[str, Array]
compiled = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)


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
    cfg: ModelConfig, params: Flat, rows: dict[int, Array], drop: Dropout | None = None
) -> transformer.Weights:
    """The tree for `network.forward`: weights as stored, tables as read rows, some of them dropped
    if asked."""
    leaves = declared(cfg)
    used: dict[str, Any] = {}
    for name, value in params.items():
        if name.endswith("table"):
            value = value[rows[int(name.split("/")[1])]]
        value = stored.rounded(value, stored.kind(leaves[name]))
        used[name] = drop.rows(value) if drop is not None and name.endswith("table") else value
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


def several(
    one: Callable[[Flat, optimiser.State, Array, Array], tuple[Flat, optimiser.State, Found]],
    params: Flat,
    state: optimiser.State,
    batches: Int32[Array, "steps b s1"],
    key: Array,
) -> tuple[Flat, optimiser.State, Found]:
    """`one` step after another on the device, each with its batch and its key; means of what it
    found. At this size a step is short, and a host that waits for each would be most of the time.
    """

    def body(carry: Any, given: Any) -> Any:
        params, state, found = one(*carry, *given)
        return (params, state), found

    keys = jax.random.split(key, batches.shape[0])
    (params, state), found = jax.lax.scan(body, (params, state), (batches, keys))
    return params, state, jax.tree.map(lambda x: jnp.mean(x, axis=0), found)


@functools.partial(compiled, static_argnums=0)
def validation(
    cfg: ModelConfig, params: Flat, classes: Array, batch: Int32[Array, "b s"]
) -> Float[Array, ""]:
    """Mean nats of all tokens but the first, weights and caches as stored."""
    tokens = batch[:, :-1]
    weights = prepared(cfg, params, hashed(cfg, classes, tokens))
    out = network.forward(SETUP(cfg), weights, tokens, stored=True)
    return jnp.mean(cross_entropy(out.logits, batch[:, 1:]))


class Run:
    """A training folder: tokenizer, streams, newest state, log.

    kjv: the printed Bible, None to fetch it; ready: a folder with the DATA of another run, taken
    instead; batch: sequences a step; steps: of a device call."""

    DATA = "streams.npz", "config.json", "tokenizer.json", "tokenizer_config.json"

    def __init__(
        self,
        folder: Path,
        kjv: Path | None = None,
        seed: int = 0,
        *,
        ready: Path | None = None,
        batch: int = 16,
        steps: int = 16,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.seed, self.batch, self.steps = folder, seed, batch, steps
        if ready is not None:
            for name in self.DATA:
                shutil.copyfile(ready / name, folder / name)
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

    def batches(self, share: float, seed: int) -> Iterator[np.ndarray]:
        """int32 [steps, batch, LENGTH + 1] without end; share: of sequences from the Bible."""
        bible = round(share * self.batch)
        mix = {"bible": bible, "made": self.batch - bible}
        source = corpus.batches(self.train, seed, mix, LENGTH)
        while True:
            yield np.stack([next(source) for _ in range(self.steps)])

    def validate(self, params: Flat, most: int = 16) -> dict[str, float]:
        """Held-out nats by kind, over at most `most` windows of each."""
        found = {}
        for kind, ids in self.held_out.items():
            cut = corpus.windows(ids, LENGTH + 1)[:most]
            parts = [cut[i : i + CHECKED] for i in range(0, len(cut) - CHECKED + 1, CHECKED)]
            nats = [validation(self.cfg, params, self.classes, part) for part in parts]
            found[kind] = float(np.mean([float(n) for n in nats]))
        return found


def rate_share(done: float, number: int) -> float:
    """Of the full learning rate: up over the first 100 steps, flat, from 40% of the stage's time on
    down to 0."""
    return min(1.0, (number + 1) / 100) * min(1.0, max(0.0, (1.0 - done) / 0.6))


def mark(weights: Flat) -> str:
    """A hash that tells weights apart."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(f"{name} {value.dtype} {value.shape} ".encode())
        found.update(np.asarray(value).tobytes())
    return found.hexdigest()


def stage(
    run: Run,
    name: str,
    fresh: Callable[[], Flat],
    share: float,
    steps: Callable[[Flat, Any, np.ndarray, Array, Array], tuple[Flat, Any, Found]],
    seconds: float,
    check: Callable[[Flat], dict[str, float]],
    keep: Callable[[Flat], None],
    after: tuple[str, ...] = (),
) -> Flat:
    """Runs a stage for `seconds` of wall clock in all, compiling and checks included, over however
    many calls; the weights of the check that lost least.

    share: of the Bible in a batch; steps: of weights, optimiser, batches, a key and the share of
    the learning rates; check: the nats that count; keep: called with the best weights so far at
    every check; after: what the stage depends on (`mark`): saved work after something else is begun
    anew.
    """
    saved = run.load(name)
    if saved is None or tuple(saved[6:]) != after:
        params = fresh()
        state, used, number = optimiser.start(params), 0.0, 0
        best, least = jax.tree.map(jnp.copy, params), np.inf  # a step takes its weights' buffers
    else:
        params, state, used, number, best, least = jax.tree.map(jnp.asarray, saved[:6])
        used, number, least = float(used), int(number), float(least)
    if used >= seconds:
        return best
    source = run.batches(share, run.seed + number)
    batches, between = next(source), min(180.0, max(30.0, seconds / 16))
    begin = time.monotonic() - used
    shown = kept = time.monotonic()
    losses: list[float] = []
    while used < seconds:
        key = jax.random.fold_in(jax.random.key(run.seed), number)
        now = jnp.float32(rate_share(used / seconds, number))
        params, state, found = steps(params, state, batches, key, now)
        batches = next(source)  # while the device computes
        losses.append(float(found.pop("loss")))
        number += run.steps
        used = time.monotonic() - begin
        done = {"stage": name, "step": number, "seconds": used}
        if time.monotonic() - shown > 5 or number == run.steps or used >= seconds:
            shown = time.monotonic()
            tokens = number * run.batch * LENGTH
            run.log(**done, tokens=tokens, loss=float(np.mean(losses)), **found)
            losses = []
        if time.monotonic() - kept > between or used >= seconds:
            marks = check(params)
            if sum(marks.values()) <= least:
                best, least = jax.tree.map(jnp.copy, params), sum(marks.values())
            run.save(name, (params, state, used, number, best, least, *after))
            keep(best)
            run.log(**done, check=1, **marks)
            kept = time.monotonic()
    return best
