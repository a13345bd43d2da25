"""Random numbers as a function of (request seed, absolute position, purpose), nothing else.

A draw for token id v of a row is one 32-bit word

    word(v) = mix(mix(v ^ a) + b),      (a, b) = words of (key, position, purpose)

where ``mix`` is a bijection of 32-bit words with full avalanche (two multiplications between three
shifts; C. Wellons, "Prospecting for hash functions", lowbias32). There is no state and no sequence:
the noise of one id can be computed without that of the others, on any device, in any batch, and
again after a preemption. Sixteen integer operations an element, a fifth of Threefry.

Gumbel noise uses E = -log(u), an Exp(1) variate, as -log1p(-(word + 1/2) 2^-32): a small E, the one
that can win, keeps all its bits. Keys are two uint32 made on the host by ``request_key``.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

# What a draw is for; each purpose has its own stream at a position.
SAMPLE = 0  # the token at a position, by the target and (coupled) by the drafter
ACCEPT = 1  # acceptance of a draft by rejection sampling
RESIDUAL = 2  # the token drawn from the residual after a rejection
DRAFT = 3  # the drafter's own token under rejection sampling

_MASK = 2**64 - 1


def _mix64(value: int) -> int:
    """A bijection of 64-bit words (the finaliser of SplitMix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def fold_in(key: int, number: int) -> int:
    """A new 64-bit key from a key and a number: distinct for distinct numbers."""
    return _mix64(_mix64(key & _MASK) + 0x9E3779B97F4A7C15 * (number + 1) & _MASK)


def request_key(
    seed: int | None, llm_seed: int, number: int, sample: int
) -> UInt32[np.ndarray, "2"]:
    """Key of one sample: of the request's own seed, else of the LLM's and the request's number.

    ``sample`` is the index among the n samples of the prompt; sample 0 does not depend on n.
    """
    base = fold_in(seed, 0) if seed is not None else fold_in(fold_in(llm_seed, 1), number)
    key = fold_in(base, sample)
    return np.array([key >> 32, key & 0xFFFFFFFF], np.uint32)


def _mix(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


def _row_words(
    key: UInt32[Array, "rows 2"], position: Int32[Array, " rows"], purpose: int
) -> tuple[UInt32[Array, " rows"], UInt32[Array, " rows"]]:
    place = _mix(position.astype(jnp.uint32) * jnp.uint32(4) + jnp.uint32(purpose))
    a = _mix(_mix(key[:, 0] ^ place) + key[:, 1])
    b = _mix(_mix(key[:, 1] ^ place ^ jnp.uint32(0x9E3779B9)) + a)
    return a, b


def _exponential(word: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Exp(1) variate from a word; at most 16.6, so that its logarithm is finite."""
    u = (word.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log1p(-jnp.minimum(u, jnp.float32(1 - 2**-24)))


def gumbel(
    key: UInt32[Array, "rows 2"],
    position: Int32[Array, " rows"],
    purpose: int,
    ids: Int32[Array, " ids"],
) -> Float[Array, "rows ids"]:
    """Standard Gumbel noise, float32, of the given token ids at each row's position; finite."""
    a, b = _row_words(key, position, purpose)
    words = _mix(_mix(ids.astype(jnp.uint32)[None, :] ^ a[:, None]) + b[:, None])
    return -jnp.log(_exponential(words))


def uniform(
    key: UInt32[Array, "rows 2"], position: Int32[Array, " rows"], purpose: int
) -> Float[Array, " rows"]:
    """One float32 in (0, 1) a row."""
    a, b = _row_words(key, position, purpose)
    word = _mix(_mix(a) + b) >> 8
    return (word.astype(jnp.float32) + 0.5) * jnp.float32(2**-24)
