"""The whole model, one sequence at a time, from the mechanisms beside this file.

`Model(folder, token_map).run(ids)` returns the logits and every intermediate under the name and
layer that `deepinfer_jax.model.capture` gives it, so that a comparison can name the first mechanism
that departs. `margin` is the smallest gap of any selection: below a rounding error of the scores
two correct implementations may differ there, and a test should draw other numbers instead.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle import attention, engram, experts, hyper
from tests.oracle.checkpoint import Checkpoint
from tests.oracle.rules import Rules, norm


class Run:
    """logits [s, vocab]; found: name -> layer -> value; margin."""

    def __init__(self) -> None:
        self.logits = np.zeros(0)
        self.taps = np.zeros(0)
        self.found: dict[str, dict[int, Any]] = {}
        self.margin = np.inf

    def add(self, name: str, layer: int, value: Any) -> None:
        self.found.setdefault(name, {})[layer] = value


class Model:
    """A checkpoint folder under some rules; token_map int [vocab], or None without Engram."""

    def __init__(self, folder: Path, token_map: np.ndarray | None, rules: Rules) -> None:
        self.store = Checkpoint(folder)
        self.token_map = token_map
        self.rules = rules

    def run(self, ids: np.ndarray) -> Run:
        """Every position of one sequence."""
        rules, store, cfg = self.rules, self.store, self.store.config
        run = Run()
        streams, pre = self._expand(ids)
        rows = self._table_rows(ids)
        entries: dict[int, attention.Entries] = {}
        selected: attention.Selected | None = None
        taps = []
        for layer in range(cfg["num_hidden_layers"]):
            run.add("streams", layer, streams)
            if layer in rows:
                run.add("engram_rows", layer, rows[layer])
                streams = engram.lookup(rules, store, layer, rows[layer], streams)
                run.add("after_engram", layer, streams)
            if layer in cfg["dspark_target_layer_ids"]:
                taps.append(rules.out(streams.mean(axis=1)))
                run.add("taps", layer, taps[-1])
            ratio = cfg["compress_ratios"][layer]
            prefix = f"layers.{layer}.attn"

            def attend(x: np.ndarray, layer=layer, ratio=ratio, prefix=prefix) -> np.ndarray:
                nonlocal selected
                speed = attention.frequencies(cfg, ratio > 0)
                position = np.arange(len(x))
                low, q = attention.queries(rules, store, prefix, x, position, speed)
                window = attention.window_kv(rules, store, prefix, x, position, speed)
                if layer in cfg["kv_source_layer_ids"]:
                    entries[layer] = attention.compress(rules, store, prefix, x, ratio)
                    run.add("compressed_kv", layer, entries[layer].kv)
                    run.add("index_keys", layer, entries[layer].keys)
                source = max((s for s in entries if s <= layer), default=None)
                if layer in cfg["index_source_layer_ids"]:
                    border = cfg.get("candidate_source_layer_id")
                    limited = border is not None and layer > border
                    pool = selected.pool if limited else None
                    keys = entries[source].keys
                    selected = attention.select(rules, store, layer, ratio, x, low, keys, pool)
                    run.add("index_topk", layer, selected.chosen)
                    if layer == border:
                        run.add("candidates", layer, selected.pool)
                    run.margin = min(run.margin, selected.margin)
                out = []
                for p in position:
                    slots = min(cfg["sliding_window"], len(x))
                    seen = window[max(p + 1 - cfg["sliding_window"], 0) : p + 1]
                    absent = np.full((slots - len(seen), seen.shape[1]), np.nan)
                    keys = [seen, absent]
                    if ratio:
                        keys.append(entries[source].kv[selected.chosen[p]])
                    out.append(
                        attention.softmax_attention(
                            rules,
                            q[p],
                            np.concatenate(keys),
                            store[f"{prefix}.attn_sink"],
                            cfg["head_dim"] ** -0.5,
                        )
                    )
                return attention.output(rules, store, prefix, np.stack(out), position, speed)

            count = cfg["n_routed_experts"], cfg["num_experts_per_tok"]
            streams, pre = self.block(run, f"layers.{layer}", layer, streams, pre, attend, *count)
        run.add("streams", cfg["num_hidden_layers"], streams)
        run.taps = np.concatenate(taps, axis=-1) if taps else run.taps
        x = hyper.collapse(rules, streams, pre)
        run.add("collapsed", cfg["num_hidden_layers"], x)
        run.logits = self.head(x, "norm")
        return run

    def block(self, run: Run, prefix, layer: int, streams, pre, attend, experts_of, count):
        """Both sublayers of a layer or a draft stage: (streams, pre for the next)."""
        rules, store, cfg = self.rules, self.store, self.store.config

        def mixes(which: str, streams: np.ndarray) -> tuple:
            parts = (store[f"{prefix}.{which}_{part}"] for part in ("fn", "base", "scale"))
            return hyper.mixes(rules, streams, *parts, cfg)

        next_pre, post, comb = mixes("hc_attn", streams)
        x = hyper.collapse(rules, streams, pre)
        x = norm(rules, x, store[f"{prefix}.attn_norm"], cfg["rms_norm_eps"])
        run.add("attn_in", layer, x)
        out = attend(x)
        run.add("attn_out", layer, out)
        streams = hyper.write_back(rules, out, streams, post, comb)

        pre, post, comb = mixes("hc_ffn", streams)
        x = hyper.collapse(rules, streams, next_pre)
        x = norm(rules, x, store[f"{prefix}.ffn_norm"], cfg["rms_norm_eps"])
        run.add("ffn_in", layer, x)
        out, ids, weights, margin = experts.moe(rules, store, f"{prefix}.ffn", x, experts_of, count)
        run.margin = min(run.margin, margin)
        run.add("routes", layer, ids)
        run.add("route_weights", layer, weights)
        run.add("ffn_out", layer, out)
        run.add("pre_mix", layer, pre)
        return hyper.write_back(rules, out, streams, post, comb), pre

    def head(self, x: np.ndarray, norm_name: str) -> np.ndarray:
        """Logits of collapsed rows."""
        normed = norm(self.rules, x, self.store[norm_name], self.store.config["rms_norm_eps"])
        return normed @ self.store["head"].T

    def _expand(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n = self.store.config["hc_mult"]
        streams = np.repeat(self.store["embed"][ids][:, None, :], n, axis=1)
        return streams, np.tile(np.eye(n)[0], (len(ids), 1))

    def _table_rows(self, ids: np.ndarray) -> dict[int, np.ndarray]:
        cfg = self.store.config
        if not cfg["engram_layer_ids"]:
            return {}
        classes = [int(c) for c in self.token_map[ids]]
        pad = int(self.token_map[cfg["engram_pad_token_id"]])
        made = engram.constants(cfg)
        return {layer: engram.table_rows(classes, pad, *made[layer]) for layer in made}
