"""DSpark after a finished forward pass (V4.1 report 2.6)."""

from typing import NamedTuple

import numpy as np

from tests.oracle import attention, hyper
from tests.oracle.model import Model, Run
from tests.oracle.rules import norm


class Draft(NamedTuple):
    """ids [k], logits [k, vocab], confidence [k], routes of each stage [k, experts a token]."""

    ids: list[int]
    logits: np.ndarray
    confidence: np.ndarray
    routes: list[np.ndarray]


def draft(model: Model, run: Run, anchor: int) -> Draft:
    """The greedy block after `run`, `anchor` being the token that follows its last position."""
    rules, store, cfg = model.rules, model.store, model.store.config
    eps, block = cfg["rms_norm_eps"], cfg["dspark_block_size"]
    stages = cfg["num_nextn_predict_layers"]
    speed = attention.frequencies(cfg, False)
    main = rules.product(run.taps, store["mtp.0.main_proj"])
    main = norm(rules, main, store["mtp.0.main_norm"], eps)
    ids = np.array([anchor] + [cfg["dspark_noise_token_id"]] * (block - 1))
    streams, pre = model._expand(ids)
    position = len(run.taps) + np.arange(block)
    seen = Run()
    for stage in range(stages):
        prefix = f"mtp.{stage}.attn"
        past = np.arange(len(main))
        context = attention.window_kv(rules, store, prefix, main, past, speed)
        context = context[-cfg["sliding_window"] :]

        def attend(x: np.ndarray, prefix=prefix, context=context) -> np.ndarray:
            _, q = attention.queries(rules, store, prefix, x, position, speed)
            own = attention.window_kv(rules, store, prefix, x, position, speed)
            keys, sink = np.concatenate([context, own]), store[f"{prefix}.attn_sink"]
            scale = cfg["head_dim"] ** -0.5
            out = [attention.softmax_attention(rules, row, keys, sink, scale) for row in q]
            return attention.output(rules, store, prefix, np.stack(out), position, speed)

        count = cfg["dspark_n_routed_experts"], cfg["dspark_num_experts_per_tok"]
        streams, pre = model.block(seen, f"mtp.{stage}", stage, streams, pre, attend, *count)
    run.margin = min(run.margin, seen.margin)
    last = f"mtp.{stages - 1}"
    x = hyper.collapse(rules, streams, pre)
    logits = model.head(x, f"{last}.norm")
    embed, head = store[f"{last}.markov_head.embed"], store[f"{last}.markov_head.head"]
    proj = store[f"{last}.confidence_head.proj"][0]
    previous, found, confidence = anchor, [], []
    for i in range(block):
        logits[i] += head @ embed[previous]
        confidence.append(proj @ np.concatenate([x[i], embed[previous]]))
        previous = int(logits[i].argmax())
        found.append(previous)
    routes = [seen.found["routes"][stage] for stage in range(stages)]
    return Draft(found, logits, np.array(confidence), routes)
