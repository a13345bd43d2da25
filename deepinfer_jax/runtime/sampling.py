"""From logits to a token: the options of ``SamplingParams`` on the device, one row at a time.

Order (fixed by the public interface): penalties; bias, bans, allowed ids, stop ids before
``min_tokens``; grammar mask; temperature; top-k; top-p over what top-k left; min-p; Gumbel-max

    token = argmax_v (z_v + g_v),   z = log-weights with maximum 0, -inf where v cannot be emitted,

with the noise g of ``noise.py``. Temperature 0 makes z one-hot at the argmax, so that every later
step (sampling, verification of drafts, processed log-probabilities) needs no second path. All ties
go to the lowest id. A row whose logits hold NaN or +inf, or of which nothing is left, is not valid:
its token means nothing and the engine ends that request.

A row's result is bit for bit the same whatever the other rows are and in whatever bucket it runs:
all is elementwise, or a maximum, or a sum of integers. Probability mass is counted in units of
2^-42 of the likeliest token (three limbs of 14 bits in uint32), so no order of summation shows; the
top-k and top-p sets are found digit by digit over the sort keys, without a sort. What no row asked
for is skipped by ``lax.cond``. No branch holds a loop or a sort on a GPU: there those make the
host wait for the predicate, and the next step could not be prepared meanwhile.
Names: "rows" predictions, "slots" sequences, "vocab" rows of the head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from deepinfer_jax.model.compile import shared
from deepinfer_jax.runtime.noise import SAMPLE, gumbel
from deepinfer_jax.runtime.sampling_state import MAX_VOCAB, Leaf, RowParams, Tables

BLOCK = 128  # ids
LIMB = 14  # bits; three limbs hold a mass, and up to MAX_VOCAB of them add up in a uint32
Limbs = tuple[Array, Array, Array]  # high, mid, low; uint32


@struct.dataclass
class Sampled:
    """token int32 [rows]; valid bool [rows]; logprob f32 [rows] of the token, and of the likeliest
    ids: top_ids int32, top_logprobs f32 [rows, top], each of the kind the row asked for."""

    token: Leaf
    valid: Leaf
    logprob: Leaf
    top_ids: Leaf
    top_logprobs: Leaf


ZERO, ONE = np.uint32(0), np.uint32(1)
Kept = Bool[Array, "rows vocab"]


@shared()
def adjust(
    logits: Float[Array, "rows vocab"],
    params: RowParams,
    tables: Tables,
    slot: Int32[Array, " rows"],
    position: Int32[Array, " rows"],
    earlier: Int32[Array, "rows width"] | None = None,
    allowed: Bool[Array, "rows vocab"] | None = None,
) -> Float[Array, "rows vocab"]:
    """Logits after penalties, biases, bans, stop ids held back and the grammar mask; -inf: banned.

    position: absolute position of the token that a row predicts. earlier: ids already fed in this
    step, in front of the row's prediction, that the tables do not count yet (drafts), -1 for none;
    so each row sees the counts it would see if tokens were decoded one by one.
    """
    rows, vocab = logits.shape

    def change(logits):
        output = jnp.take(tables.output, slot, axis=0, mode="clip")
        if earlier is not None:
            row = jnp.broadcast_to(jnp.arange(rows)[:, None], earlier.shape)
            ids = jnp.where(earlier < 0, vocab, earlier)
            output = output.at[row, ids].add(1, mode="drop")
        seen = jnp.take(tables.prompt, slot, axis=0, mode="clip") | (output > 0)
        repetition = params.repetition[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(seen & (repetition != 1), repeated, logits)
        logits = logits - params.frequency[:, None] * output.astype(jnp.float32)
        logits = logits - jnp.where(output > 0, params.presence[:, None], 0.0)
        bias = jnp.take(tables.bias, slot, axis=0, mode="clip")
        logits = jnp.where(params.shaped[:, None], logits + bias, logits)
        stop = jnp.take(tables.stop, slot, axis=0, mode="clip")
        early = (position < params.stop_from)[:, None]
        return jnp.where(stop & early, -jnp.inf, logits)

    asked = (
        (params.repetition != 1)
        | (params.presence != 0)
        | (params.frequency != 0)
        | params.shaped
        | (position < params.stop_from)
    )
    logits = lax.cond(jnp.any(asked), change, lambda logits: logits, logits)
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def _limbs(weight: Float[Array, "..."]) -> Limbs:
    """A weight as integers: units of 2^-14, 2^-28 and 2^-42, each limb below 2^14 (first: any)."""
    high = jnp.floor(weight * 2**LIMB)
    rest = weight * 2**LIMB - high
    mid = jnp.floor(rest * 2**LIMB)
    low = jnp.floor((rest * 2**LIMB - mid) * 2**LIMB)
    return high.astype(jnp.uint32), mid.astype(jnp.uint32), low.astype(jnp.uint32)


def _sums(parts: list[UInt32[Array, "rows vocab"]]) -> Sequence[UInt32[Array, " rows"]]:
    """Sums over the vocabulary, all in one pass."""

    def add(left, right):
        return tuple(a + b for a, b in zip(left, right, strict=True))

    return lax.reduce(tuple(parts), (ZERO,) * len(parts), add, (1,))


def _masses(weight: Float[Array, "rows vocab"], sets: Sequence[Kept]) -> list[Limbs]:
    """Exact sum of the weights in each set, carried: the same in every order of summation."""
    limbs = _limbs(weight)
    sums = _sums([jnp.where(kept, limb, ZERO) for kept in sets for limb in limbs])
    carried = []
    for high, mid, low in zip(sums[::3], sums[1::3], sums[2::3], strict=True):
        mid = mid + (low >> LIMB)
        high = high + (mid >> LIMB)
        carried.append((high, mid & (2**LIMB - 1), low & (2**LIMB - 1)))
    return carried


def _real(mass: Limbs) -> Float[Array, " rows"]:
    high, mid, low = (limb.astype(jnp.float32) for limb in mass)
    return (high + (mid + low * 2.0**-LIMB) * 2.0**-LIMB) * 2.0**-LIMB


def _at_least(mass: Limbs, target: Limbs) -> Bool[Array, " rows"]:
    (a, b, c), (x, y, z) = mass, target
    return (a > x) | ((a == x) & ((b > y) | ((b == y) & (c >= z))))


def _loop(count: int, body: Callable, value: Any) -> Any:
    """``fori_loop``, written out for CUDA (see above), where compiling it costs the least."""

    def run(value, unroll):
        return lax.fori_loop(0, count, body, value, unroll=unroll)

    return lax.platform_dependent(
        value, cuda=lambda value: run(value, True), default=lambda value: run(value, 1)
    )


def _prefix(
    order: UInt32[Array, "rows vocab"],
    asked: Bool[Array, " rows"],
    reached: Callable[[Sequence[Kept]], Sequence[Bool[Array, " rows"]]],
) -> Kept:
    """The shortest prefix, in the order (key falling, id rising), that ``reached`` is true of.

    ``reached`` says it of several sets at once, grows with the set and is true of all ids together.
    The key that the prefix ends in is found two bits a pass (its digit is the number of larger
    digits that still reach); among ids that share it, by halving the range they span. Rows that are
    not ``asked`` keep everything.
    """
    rows, vocab = order.shape
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, :]

    def digit(step, key):
        shift = 30 - 2 * jnp.uint32(step)
        longer = [key | (np.uint32(n) << shift) for n in (1, 2, 3)]
        hits = reached([order >= other[:, None] for other in longer])
        return key | (sum((hit.astype(jnp.uint32) for hit in hits), ZERO) << shift)

    last = _loop(16, digit, jnp.zeros(rows, jnp.uint32))[:, None]
    above, equal = order > last, order == last

    def halve(_, bounds):  # both bounds are ids of `equal`; the prefix ends at or between them
        first, final = bounds
        middle = first + (final - first) // 2
        lower = equal & (ids <= middle[:, None])
        (enough,) = reached([above | lower])
        final_of_lower = jnp.max(jnp.where(lower, ids, -1), -1)
        first_of_upper = jnp.min(jnp.where(equal & ~lower, ids, vocab), -1)
        stays = enough | (first == final)
        return jnp.where(stays, first, first_of_upper), jnp.where(enough, final_of_lower, final)

    bounds = jnp.min(jnp.where(equal, ids, vocab), -1), jnp.max(jnp.where(equal, ids, -1), -1)
    for count in (2, vocab.bit_length()):  # two are enough for a pair, and pairs are what occurs
        some = jnp.any(asked & (bounds[0] < bounds[1]))
        halves = functools.partial(_loop, count, halve)
        bounds = lax.cond(some, halves, lambda bounds: bounds, bounds)
    return ~asked[:, None] | above | (equal & (ids <= bounds[1][:, None]))


@shared()
def distribution(
    logits: Float[Array, "rows vocab"], params: RowParams
) -> Float[Array, "rows vocab"]:
    """Log-weights z of what may be emitted: maximum 0, -inf for the rest, after temperature, top-k,
    top-p and min-p. Greedy rows: 0 at the argmax alone. A row of -inf stays one."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
    top = jnp.max(logits, -1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    hot = params.temperature > 0
    # Subtracting first keeps tiny temperatures finite: the maximum is 0 whatever divides it.
    z = (logits - top) / jnp.clip(params.temperature, 1e-30, 1e30)[:, None]
    best = jnp.argmax(logits, -1).astype(jnp.int32)[:, None]
    z = jnp.where(hot[:, None] | ((ids == best) & (logits > -jnp.inf)), z, -jnp.inf)

    by_count = hot & (params.top_k > 0)
    by_mass = hot & (params.top_p < 1)

    def count_cut(z):
        wanted = jnp.minimum(params.top_k, jnp.sum(z > -jnp.inf, -1, dtype=jnp.int32))

        def reached(sets):
            counts = _sums([kept.astype(jnp.uint32) for kept in sets])
            return [count >= wanted.astype(jnp.uint32) for count in counts]

        # z <= 0: its magnitude as bits falls as z rises.
        order = np.uint32(0x7F800000) - lax.bitcast_convert_type(jnp.abs(z), jnp.uint32)
        return jnp.where(_prefix(order, by_count, reached), z, -jnp.inf)

    def mass_cut(z):
        weight = lax.optimization_barrier(jnp.exp(z))  # the one array that a pass reads
        (total,) = _masses(weight, [jnp.ones(z.shape, jnp.bool_)])
        a, b, c = _limbs(_real(total) * params.top_p)
        # Between one unit and all there is, whatever the product was rounded to.
        c = jnp.where((a | b | c) == 0, ONE, c)
        within = _at_least(total, (a, b, c))
        a, b, c = (jnp.where(within, w, t) for w, t in zip((a, b, c), total, strict=True))

        def reached(sets):
            return [_at_least(mass, (a, b, c)) for mass in _masses(weight, sets)]

        order = lax.bitcast_convert_type(weight, jnp.uint32)  # not negative: in their own order
        return jnp.where(_prefix(order, by_mass, reached), z, -jnp.inf)

    z = lax.cond(jnp.any(by_count), count_cut, lambda z: z, z)
    z = lax.cond(jnp.any(by_mass), mass_cut, lambda z: z, z)
    return jnp.where(z >= jnp.log(params.min_p)[:, None], z, -jnp.inf)


def choose(
    z: Float[Array, "rows vocab"],
    params: RowParams,
    position: Int32[Array, " rows"],
    purpose: int = SAMPLE,
) -> Int32[Array, " rows"]:
    """Gumbel-max sample of the distribution z, with the noise of the position and the purpose."""
    ids = jnp.arange(z.shape[-1], dtype=jnp.int32)

    def noisy(z):
        return jnp.argmax(z + gumbel(params.key, position, purpose, ids), -1).astype(jnp.int32)

    def plain(z):
        return jnp.argmax(z, -1).astype(jnp.int32)

    return lax.cond(jnp.any(params.temperature > 0), noisy, plain, z)


def log_normaliser(values: Float[Array, "rows vocab"]) -> Float[Array, " rows"]:
    """log sum exp of each row, float32; the sum is exact to 2^-42 of its largest term an id."""
    top = jnp.max(values, -1)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weight = jnp.exp(values - top[:, None])
    (mass,) = _masses(weight, [jnp.ones(values.shape, jnp.bool_)])
    return top + jnp.log(_real(mass))


def likeliest(
    values: Float[Array, "rows vocab"], top: int
) -> tuple[Float[Array, "rows top"], Int32[Array, "rows top"]]:
    """The ``top`` largest values of each row and their ids, largest first, equals by lowest id.

    They lie in the ``top`` blocks of largest maximum, so only those are sorted.
    """
    rows, vocab = values.shape
    blocks = -(-vocab // BLOCK)
    if blocks <= 2 * top:
        best, ids = lax.top_k(values, top)
        return best, ids.astype(jnp.int32)
    fill = ((0, 0), (0, blocks * BLOCK - vocab))
    tiles = jnp.pad(values, fill, constant_values=-jnp.inf).reshape(rows, blocks, BLOCK)
    chosen = jnp.sort(lax.top_k(jnp.max(tiles, -1), top)[1], -1).astype(jnp.int32)
    near = jnp.take_along_axis(tiles, chosen[:, :, None], axis=1).reshape(rows, -1)
    best, place = lax.top_k(near, top)
    place = place.astype(jnp.int32)
    ids = jnp.take_along_axis(chosen, place // BLOCK, axis=1) * BLOCK + place % BLOCK
    return best, jnp.minimum(ids, vocab - 1)


def report(
    values: Float[Array, "rows vocab"],
    token: Int32[Array, " rows"],
    wanted: Int32[Array, " rows"],
    top: int,
) -> tuple[Float[Array, " rows"], Int32[Array, "rows top"], Float[Array, "rows top"]]:
    """Log-probability of each row's token, and its ``top`` likeliest ids with theirs.

    values: logits or log-weights; wanted: as ``RowParams.logprobs``. Where no row wants any, the
    log-probabilities mean nothing. ``top`` is static: a program without alternatives does not sort.
    """

    def normalised(values):
        index = jnp.clip(token, 0, values.shape[-1] - 1)[:, None]
        norm = log_normaliser(values)
        return jnp.take_along_axis(values, index, axis=-1)[:, 0] - norm, norm

    zeros = jnp.zeros(values.shape[0], jnp.float32)
    logprob, norm = lax.cond(jnp.any(wanted >= 0), normalised, lambda _: (zeros, zeros), values)
    best, ids = likeliest(values, min(top, values.shape[-1]))
    return logprob, ids, best - norm[:, None]


def sample(
    logits: Float[Array, "rows vocab"],
    params: RowParams,
    tables: Tables,
    slot: Int32[Array, " rows"],
    position: Int32[Array, " rows"],
    *,
    earlier: Int32[Array, "rows width"] | None = None,
    allowed: Bool[Array, "rows vocab"] | None = None,
    forced: Int32[Array, " rows"] | None = None,
    top: int = 0,
) -> Sampled:
    """One token a row; arguments as of ``adjust``, ``params`` already one entry a row.

    forced: ids that replace the sampled ones (-1: none); their log-probabilities are of the
    distribution that would have been sampled from. Raises ValueError above MAX_VOCAB ids.
    """
    if logits.shape[-1] > MAX_VOCAB:
        raise ValueError(f"vocab {logits.shape[-1]}: sampling is exact only up to {MAX_VOCAB} ids")
    with jax.named_scope("sampling"):
        sound = jnp.all(logits < jnp.inf, -1)  # false for NaN too
        masked = adjust(logits, params, tables, slot, position, earlier, allowed)
        masked = jnp.where(sound[:, None], masked, -jnp.inf)
        z = distribution(masked, params)
        token = choose(z, params, position)
        valid = sound & (jnp.max(z, -1) > -jnp.inf)
        if forced is not None:
            token, valid = jnp.where(forced < 0, token, forced), sound & (valid | (forced >= 0))
        values = jnp.where(params.processed[:, None], z, logits)
        logprob, top_ids, top_logprobs = report(values, token, params.logprobs, top)
        return Sampled(token, valid, logprob, top_ids, top_logprobs)
