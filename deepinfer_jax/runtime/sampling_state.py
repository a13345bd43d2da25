"""What sampling needs to know of each slot: options as arrays, and tables over the vocabulary.

``RowParams`` holds numbers, one entry a slot, ``Tables`` dense rows over the vocabulary, which put
no cap on the length of a ban list or a bias and cost 10 bytes an id and slot. Both stay on the
device, donated to the step and rewritten only when a request enters a slot: no step sends them.

A request's whole sampling state is one entry of each; preemption moves it like the rings.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, UInt32

from deepinfer_jax.runtime.sampling_params import SamplingParams

MAX_VOCAB = 2**18 - 1  # ids whose masses `sampling` can add up without overflow
Leaf = Any  # array, ShapeDtypeStruct or PartitionSpec


@struct.dataclass
class RowParams:
    """Options by number, one entry a slot; ``take`` makes it one entry a row.

    key uint32 [n, 2]; stop_from int32: the absolute position from which stop ids may appear;
    shaped bool: whether ``Tables.bias`` has anything for the slot; logprobs int32: alternatives to
    report, -1 for no log-probabilities at all; processed bool: of which distribution.
    """

    key: Leaf
    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    min_p: Leaf
    repetition: Leaf
    presence: Leaf
    frequency: Leaf
    stop_from: Leaf
    shaped: Leaf
    logprobs: Leaf
    processed: Leaf

    def take(self, slot: Int32[Array, " rows"]) -> "RowParams":
        """Entries of the given slots; slots out of range (padding) give some entry."""
        return jax.tree.map(lambda leaf: jnp.take(leaf, slot, axis=0, mode="clip"), self)


@struct.dataclass
class Tables:
    """What a slot's requests say of each id, kept on the device.

    bias f32 [slots, vocab], -inf bans; stop bool: ids that end the request; prompt bool: seen in
    the prompt; output int32: occurrences among the sampled ids.
    """

    bias: Leaf
    stop: Leaf
    prompt: Leaf
    output: Leaf


def neutral(slots: int) -> RowParams:
    """Host arrays (numpy, to be written in place) of requests that decode greedily."""

    def real(value: float) -> np.ndarray:
        return np.full(slots, value, np.float32)

    def integer(value: int) -> np.ndarray:
        return np.full(slots, value, np.int32)

    return RowParams(
        key=np.zeros((slots, 2), np.uint32),
        temperature=real(0.0),
        top_k=integer(0),
        top_p=real(1.0),
        min_p=real(0.0),
        repetition=real(1.0),
        presence=real(0.0),
        frequency=real(0.0),
        stop_from=integer(0),
        shaped=np.zeros(slots, np.bool_),
        logprobs=integer(-1),
        processed=np.zeros(slots, np.bool_),
    )


def write(
    host: RowParams, place: int, params: SamplingParams, key: UInt32[np.ndarray, "2"], prompt: int
) -> None:
    """Put one request's options into a place of the host arrays; prompt: its length in tokens."""
    values = {
        "key": key,
        "temperature": params.temperature,
        "top_k": min(params.top_k, MAX_VOCAB),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "stop_from": prompt + params.min_tokens,
        "shaped": shaped(params),
        "logprobs": -1 if params.logprobs is None else params.logprobs,
        "processed": params.logprobs_mode == "processed",
    }
    for name, value in values.items():
        getattr(host, name)[place] = value


def shaped(params: SamplingParams) -> bool:
    """Whether the slot's row of ``Tables.bias`` has anything but zeros."""
    listed = (params.logit_bias, params.banned_token_ids, params.allowed_token_ids)
    return any(item is not None for item in listed)


def bias_row(params: SamplingParams, vocab: int) -> Float[np.ndarray, " vocab"]:
    """The slot's row of ``Tables.bias``: logit_bias, bans, and all but the allowed ids."""
    row = np.zeros(vocab, np.float32)
    if params.allowed_token_ids is not None:
        row[:] = -np.inf
        row[list(params.allowed_token_ids)] = 0.0
    for token, bias in (params.logit_bias or {}).items():
        row[token] = bias
    if params.banned_token_ids is not None:
        row[list(params.banned_token_ids)] = -np.inf
    return row


def empty_tables(slots: int, vocab: int) -> Tables:
    """Tables of free slots. Raises ValueError where masses could overflow."""
    if vocab > MAX_VOCAB:
        raise ValueError(f"vocab {vocab}: sampling counts mass exactly only up to {MAX_VOCAB} ids")
    shape = (slots, vocab)
    return Tables(
        bias=jnp.zeros(shape, jnp.float32),
        stop=jnp.zeros(shape, jnp.bool_),
        prompt=jnp.zeros(shape, jnp.bool_),
        output=jnp.zeros(shape, jnp.int32),
    )


def install(
    tables: Tables,
    slot: Int32[Array, "*n"],
    bias: Float[Array, "*n vocab"],
    stop: Bool[Array, "*n vocab"],
    seen: Bool[Array, "*n vocab"],
) -> Tables:
    """New requests in slots (past the end: nothing): their own bias and stop ids; seen: ids of
    their prompts."""
    return Tables(
        bias=tables.bias.at[slot].set(bias, mode="drop"),
        stop=tables.stop.at[slot].set(stop, mode="drop"),
        prompt=tables.prompt.at[slot].set(seen, mode="drop"),
        output=tables.output.at[slot].set(0, mode="drop"),
    )


def _place(index: Int32[Array, "..."], size: int) -> Int32[Array, "..."]:
    """Index with every negative one moved out of range, where a scatter drops it."""
    return jnp.where(index < 0, size, index)


def count_prompt(
    tables: Tables, slot: Int32[Array, " rows"], token: Int32[Array, " rows"]
) -> Tables:
    """Note prompt tokens as seen; a row with slot -1 or token -1 is padding."""
    slots, vocab = tables.prompt.shape
    at = tables.prompt.at[_place(slot, slots), _place(token, vocab)]
    return dataclasses.replace(tables, prompt=at.set(True, mode="drop"))


def count_output(
    tables: Tables, slot: Int32[Array, " rows"], token: Int32[Array, " rows"]
) -> Tables:
    """Count accepted tokens; a row with slot -1 or token -1 is padding."""
    slots, vocab = tables.output.shape
    at = tables.output.at[_place(slot, slots), _place(token, vocab)]
    return dataclasses.replace(tables, output=at.add(1, mode="drop"))
