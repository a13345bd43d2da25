"""Several arrays with one leading axis as one array of words, for the way between host and device.

A transfer of a few bytes costs what one of a few kilobytes costs, and a step has a dozen arrays to
take and as many to give. `pack` lays their bits side by side, on the host or inside a program;
`unpack` takes them apart again on the other side.
"""

import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.spec import Leaf

WORD = np.dtype(np.int32)


class Field(NamedTuple):
    """A packed array but for its leading axis."""

    shape: tuple[int, ...]
    dtype: np.dtype


@flax.struct.dataclass
class Packed:
    """words int32 [n, the arrays' words]; structure: of the tree that was packed; fields: of its
    leaves, in order."""

    words: Leaf
    structure: Any = flax.struct.field(pytree_node=False)
    fields: tuple[Field, ...] = flax.struct.field(pytree_node=False)


def pack(tree: Any) -> Packed:
    """A tree of arrays [n, ...] of bool or 4-byte types as one; numpy arrays give a numpy array.

    Raises TypeError for another dtype, ValueError for another leading axis.
    """
    leaves, structure = jax.tree.flatten(tree)
    count = leaves[0].shape[0]
    for leaf in leaves:
        if leaf.dtype != np.bool_ and leaf.dtype.itemsize != WORD.itemsize:
            raise TypeError(f"packed array: dtype {leaf.dtype}; expected bool or one of 4 bytes")
        if leaf.shape[0] != count:
            raise ValueError(f"packed array: {leaf.shape[0]} along axis 0; expected {count}")
    there = np if all(isinstance(leaf, np.ndarray) for leaf in leaves) else jnp
    words = there.concatenate([_to_words(leaf) for leaf in leaves], axis=1)
    fields = tuple(Field(leaf.shape[1:], np.dtype(leaf.dtype)) for leaf in leaves)
    return Packed(words, structure, fields)


def unpack(packed: Packed) -> Any:
    """The tree that was packed: views of a numpy array where they can be, or new arrays."""
    leaves, end = [], 0
    for field in packed.fields:
        begin, end = end, end + math.prod(field.shape)
        leaves.append(_from_words(packed.words[:, begin:end], field))
    return jax.tree.unflatten(packed.structure, leaves)


def _to_words(leaf: Any) -> Any:
    flat = leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
    if flat.dtype == np.bool_:
        return flat.astype(WORD)
    return flat.view(WORD) if isinstance(flat, np.ndarray) else lax.bitcast_convert_type(flat, WORD)


def _from_words(words: Any, field: Field) -> Any:
    if field.dtype == np.bool_:
        flat = words != 0
    elif isinstance(words, np.ndarray):
        flat = words.view(field.dtype)
    else:
        flat = lax.bitcast_convert_type(words, field.dtype)
    return flat.reshape(words.shape[0], *field.shape)
