"""What a request must be before it is worked on: prompts as ids, options that fit the model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, no_type_check

import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.runtime.sampling_params import SamplingParams, shown
from deepinfer_jax.runtime.text import Tokenizer

Prompt = str | Sequence[int]
_BYTES = bytes | bytearray | memoryview  # sequences of integers, but not of token ids


@no_type_check  # a type checker at run time would speak before the messages below
def paired(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters. Raises ValueError for what is neither text nor ids, and for
    parameters that are no `SamplingParams`."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, _BYTES | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts: {shown(prompts)}; expected text, token ids, or a list of them")
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int | np.integer) for item in items):
        items = [items]
    for number, item in enumerate(items):
        if not _is_prompt(item):
            raise ValueError(f"prompts[{number}]: {shown(item)}; expected text or token ids")
    if params is None or isinstance(params, SamplingParams):
        return [(item, params or SamplingParams()) for item in items]
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(
            f"sampling_params: {shown(params)}; expected SamplingParams, or a list with one each"
        )
    if len(params) != len(items):
        raise ValueError(f"sampling_params: {len(params)} for {len(items)} prompts")
    return list(zip(items, params, strict=True))


@no_type_check
def token_ids(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """The ids of a prompt. Raises ValueError for what is no prompt."""
    if not _is_prompt(prompt):
        raise ValueError(f"prompt: {shown(prompt)}; expected text or token ids")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("prompt: text needs the checkpoint's tokenizer.json; give token ids")
        return tokenizer.encode(prompt)
    ids = list(prompt)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise ValueError(f"prompt: {token!r} is not a token id")
    return [int(token) for token in ids]


def _is_prompt(value: object) -> bool:
    return isinstance(value, str | Sequence | np.ndarray) and not isinstance(value, _BYTES)


def check(
    ids: list[int], params: SamplingParams, cfg: ModelConfig, context: int, has_tokenizer: bool
) -> None:
    """Raises ValueError for a request that can never be served; context: most tokens of one."""
    if not ids:
        raise ValueError("prompt: empty; give at least one token")
    if len(ids) >= context:
        raise ValueError(
            f"prompt: {len(ids)} tokens; max_context = {context} leaves room for "
            f"{context - 1} and one to make"
        )
    named = {
        "prompt": ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_token_ids": params.banned_token_ids or (),
        "stop_token_ids": params.stop_token_ids or (),
        "forced_token_ids": params.forced_token_ids or (),
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < cfg.vocab_size:
                raise ValueError(f"{name}: id {token}; expected 0..{cfg.vocab_size - 1}")
    if cfg.image_token_id in ids:
        raise ValueError(
            f"prompt: id {cfg.image_token_id} is the image token; images are not supported"
        )
    if params.forced_routes is not None:
        _check_routes(params.forced_routes, cfg)
    if params.stop is not None and not has_tokenizer:
        raise ValueError("stop: strings need the checkpoint's tokenizer.json")


def _check_routes(routes: np.ndarray, cfg: ModelConfig) -> None:
    layers, experts = cfg.num_hidden_layers, cfg.num_experts_per_tok
    if routes.shape[1:] != (layers, experts):
        raise ValueError(
            f"forced_routes: shape {list(routes.shape)}; expected [tokens, {layers}, {experts}]"
        )
    ordered = np.sort(routes, axis=-1)
    chosen = ordered[ordered[..., -1] >= 0]  # the others leave it to the router
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < cfg.n_routed_experts:
        raise ValueError(
            f"forced_routes: experts {chosen.min()}..{chosen.max()}; expected "
            f"0..{cfg.n_routed_experts - 1}, or -1 for all of a token's experts in a layer"
        )
    if (chosen[:, 1:] == chosen[:, :-1]).any():
        raise ValueError("forced_routes: the same expert twice for one token")
