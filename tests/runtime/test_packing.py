"""Packed arrays come back to the bit, from the host into a program and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.runtime import packing


def tree(rows):
    rng = np.random.default_rng(rows)
    bits = rng.integers(0, 1 << 32, (rows, 3), np.uint32)
    bits[:, 0] = 0x7F800001  # a signalling NaN: nothing may compute with it
    return {
        "none": None,
        "ids": rng.integers(-5, 5, (rows, 2, 4), np.int32),
        "nothing": np.zeros((rows, 2, 0), np.int32),
        "flag": rng.random(rows) < 0.5,
        "numbers": (bits.view(np.float32), bits),
    }


def check(found, sent):
    assert jax.tree.structure(found) == jax.tree.structure(sent)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(sent), strict=True):
        one = np.asarray(one)
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_there_and_back(rows):
    sent, turned = tree(rows), []

    @jax.jit
    def program(packed):
        turned.append(packed)
        return packing.pack(jax.tree.map(lambda leaf: leaf[::-1], packing.unpack(packed)))

    packed = packing.pack(sent)
    assert isinstance(packed.words, np.ndarray) and packed.words.shape == (rows, 8 + 1 + 6)
    check(packing.unpack(packed), sent)
    back = jax.device_get(program(packed))
    check(packing.unpack(back), jax.tree.map(lambda leaf: leaf[::-1], sent))
    program(packing.pack(tree(rows)))
    assert len(turned) == 1  # equal fields are one program


@pytest.mark.parametrize(
    ("leaf", "error", "why"),
    [
        (np.zeros((2, 3), jnp.bfloat16), TypeError, "dtype bfloat16; expected bool or one of 4"),
        (np.zeros((3, 2), np.int32), ValueError, "3 along axis 0; expected 2"),
    ],
)
def test_what_cannot_be_packed(leaf, error, why):
    with pytest.raises(error, match=why):
        packing.pack([np.zeros(2, np.int32), leaf])
