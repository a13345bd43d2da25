"""A request on its way to another process: everything about it as one checked string of bytes.

    MAGIC, length of the head (uint32), head (JSON), blake2b of the head, state

The head has the version, what the state was computed with (`identity`: weights, config, numerics,
drafts), shapes and dtypes of every leaf, blake2b and length of the state, and the request: ids,
parameters, key, what it has so far. The state is the leaves of `state.take` one after another, of
the pages those in use.

A reader refuses by name what it cannot use. A state that does not fit its checksum under an intact
head is reported as missing: the request can be computed again from its ids.
"""

import dataclasses
import hashlib
import json
import struct
from typing import Any

import jax
import numpy as np

from deepinfer_jax.runtime.outputs import Logprobs
from deepinfer_jax.runtime.requests import Handed, Sample
from deepinfer_jax.runtime.sampling_params import SamplingParams

MAGIC, VERSION, DIGEST = b"dji1", 1, 16
LENGTH = struct.Struct("<I")


class FrameError(ValueError):
    """A frame that cannot be read or does not belong here."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """A frame as read. head: its JSON; saved: the state, None if the request has ended or the state
    is damaged."""

    head: dict[str, Any]
    saved: Any
    damaged: bool


def shapes_of(saved: Any) -> list[list[Any]]:
    """[shape, dtype] of every leaf of a state; of pages without their number."""
    rows, pages = saved
    found = [[list(leaf.shape), str(leaf.dtype)] for leaf in jax.tree.leaves(rows)]
    return found + [[list(leaf.shape[1:]), str(leaf.dtype)] for leaf in jax.tree.leaves(pages)]


def pack(number: int, sample: Sample, identity: dict[str, str], handed: Handed | None) -> bytes:
    """The frame of a sample; handed: its state, None if it has ended. number: of its request."""
    leaves, shapes = [], []
    if handed is not None:
        saved = jax.device_get(handed.saved)
        shapes = shapes_of(saved)
        rows, pages = (jax.tree.leaves(part) for part in saved)
        leaves = [*rows, *(leaf[: handed.pages] for leaf in pages)]
    body = b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves)
    output, request = sample.output, sample.request
    head = {
        "version": VERSION,
        "identity": identity,
        "shapes": shapes,
        "pages": 0 if handed is None else handed.pages,
        "bytes": len(body),
        "digest": _digest(body).hex(),
        "number": number,
        "samples": len(request.outputs),
        "index": output.index,
        "text": request.prompt,
        "prompt": sample.prompt,
        "params": _plain(sample.params),
        "key": [int(word) for word in sample.key],
        "token_ids": output.token_ids,
        "logprobs": _entries(output.logprobs),
        "prompt_logprobs": _entries(request.prompt_logprobs),
        "finish": [output.finish_reason, output.stop_reason, output.text],
        "error": request.error,
        "cached_tokens": request.metrics.cached_tokens,
        "ahead": None if handed is None or handed.ahead is None else handed.ahead.tolist(),
    }
    raw = json.dumps(head).encode()
    return b"".join([MAGIC, LENGTH.pack(len(raw)), raw, _digest(raw), body])


def unpack(data: bytes, identity: dict[str, str], like: Any) -> Frame:
    """Reads a frame. like: the state of a slot of this engine, as shapes.

    Raises FrameError for a head that is damaged, and for a version, weights, numerics or shapes
    that are not this engine's.
    """
    start = len(MAGIC) + LENGTH.size
    if len(data) < start or not data.startswith(MAGIC):
        raise FrameError(f"frame: {len(data)} bytes that do not begin with {MAGIC!r}")
    end = start + LENGTH.unpack_from(data, len(MAGIC))[0]
    raw = data[start:end]
    if data[end : end + DIGEST] != _digest(raw):
        raise FrameError("frame: its head is cut off or damaged; send the request again")
    head, body = json.loads(raw), data[end + DIGEST :]
    if head["version"] != VERSION:
        raise FrameError(f"frame: version {head['version']}; this engine reads {VERSION}")
    for name, here in identity.items():
        if head["identity"].get(name) != here:
            there = head["identity"].get(name)
            raise FrameError(f"frame: computed with {name} {there}, this engine has {here}")
    if head["finish"][0] is not None:
        return Frame(head, None, damaged=False)
    if head["shapes"] != shapes_of(like):
        pairs = zip(shapes_of(like), head["shapes"], strict=False)
        here = next((f"{there}, here {one}" for one, there in pairs if one != there), "in number")
        raise FrameError(f"frame: its state has other shapes than this engine's: {here}")
    per_slot = jax.tree.leaves(like[1])[0].shape[0] if jax.tree.leaves(like[1]) else 0
    if head["pages"] > per_slot:
        raise FrameError(f"frame: {head['pages']} pages; max_context here has room for {per_slot}")
    if len(body) != head["bytes"] or _digest(body).hex() != head["digest"]:
        return Frame(head, None, damaged=True)
    return Frame(head, _leaves(body, like, head["pages"]), damaged=False)


def params_of(head: dict[str, Any]) -> SamplingParams:
    """The sampling parameters of a frame."""
    fields = dict(head["params"])
    if fields.get("forced_routes") is not None:
        fields["forced_routes"] = np.array(fields["forced_routes"], np.int32)
    if fields.get("logit_bias") is not None:
        fields["logit_bias"] = {int(token): value for token, value in fields["logit_bias"]}
    return SamplingParams(**fields)


def restore(head: dict[str, Any], sample: Sample) -> None:
    """Gives a new sample what the frame says that it has so far."""
    listed = head["logprobs"] or [None] * len(head["token_ids"])
    for token, pairs in zip(head["token_ids"], listed, strict=True):
        sample.push(token, _entry(pairs))
    if head["prompt_logprobs"] is not None:
        sample.request.prompt_logprobs = [_entry(pairs) for pairs in head["prompt_logprobs"]]


def _leaves(body: bytes, like: Any, pages: int) -> Any:
    rows, paged = like
    at, found = 0, ([], [])
    for part, leaves in enumerate((jax.tree.leaves(rows), jax.tree.leaves(paged))):
        for leaf in leaves:
            shape = (pages, *leaf.shape[1:]) if part else leaf.shape
            count = int(np.prod(shape))
            array = np.frombuffer(body, leaf.dtype, count, at).reshape(shape)
            at += array.nbytes
            if part:  # up to a slot's pages, as `state.put` takes them
                more = np.zeros((leaf.shape[0] - pages, *leaf.shape[1:]), leaf.dtype)
                array = np.concatenate([array, more])
            found[part].append(array)
    trees = zip((rows, paged), found, strict=True)
    return tuple(jax.tree.unflatten(jax.tree.structure(tree), part) for tree, part in trees)


def _plain(params: SamplingParams) -> dict[str, Any]:
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    if params.forced_routes is not None:
        fields["forced_routes"] = np.asarray(params.forced_routes).tolist()
    if params.logit_bias is not None:
        fields["logit_bias"] = [[int(k), float(v)] for k, v in dict(params.logit_bias).items()]
    return fields


def _entries(listed: list[Any] | None) -> list[Any] | None:
    """Log-probability entries as lists: JSON would make the ids strings and lose no bit else."""
    if listed is None:
        return None
    return [None if entry is None else [[k, v] for k, v in entry.items()] for entry in listed]


def _entry(pairs: list[list[Any]] | None) -> Logprobs | None:
    return None if pairs is None else {int(token): float(value) for token, value in pairs}


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST).digest()
