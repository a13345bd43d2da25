"""Indexer: scores of every query row against its sequence's index keys, and the k best entries.

`select` is the public function. `IMPLEMENTATIONS` lists the modules behind it in order of
preference; each has a `select` of the same signature (less `implementation`) and declines a case
it cannot serve by raising NotImplementedError with the reason. The equation is in `reference.py`,
the shapes that every implementation is tested and measured on are in `shapes.py`.
"""

from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import Implementation, call
from pallas_kernels.formats import Keys

IMPLEMENTATIONS = (
    Implementation("hopper", f"{__name__}.hopper", ("gpu",), (9, 0), (10, 0)),
    Implementation("reference", f"{__name__}.reference"),
)


def select(
    q: Float[Array, "g w h d"],
    weights: Float[Array, "g w h"],
    keys: Keys,
    visible: Int32[Array, "g w"],
    candidate_blocks: Bool[Array, "g w blocks"] | None = None,
    *,
    k: int,
    candidates: tuple[int, int] | None = None,
    pool: tuple[int, int] | None = None,
    implementation: str = "auto",
) -> Int32[Array, "g w k"] | tuple[Int32[Array, "g w k"], Bool[Array, "g w blocks"]]:
    """The k best visible entries of every row (V4.1 report 2.3), ascending, -1 after the last.

    Args:
        q: index queries of g sequences, w rows each, bfloat16 or float32.
        weights: head weights, already scaled.
        keys: [g, T, d], or (values uint8 [n, d/2] e2m1 low nibble first, scales float8_e8m0fnu
            [n, d/32], entry_index int32 [g, T]) for stored rows; entries past `visible` and entries
            with index -1 are never read.
        visible: entry j can be chosen by a row iff j < visible.
        candidate_blocks: only entries of these blocks can be chosen.
        k: entries to return; fewer are found when fewer are visible.
        candidates: (block, count) of `candidate_blocks`: entries a block, and the most blocks that
            are set in a row; work and memory may be sized by it instead of by T.
        pool: (block, count): also return the mask of the `count` blocks with the highest maximum,
            the newest visible entry's block always among them; not restricted by candidate_blocks.
        implementation: the name of an implementation, or "auto".

    Returns:
        int32 [g, w, k]; with `pool` also bool [g, w, ceil(T / block)].

    Raises:
        ValueError: an unknown implementation, or candidate_blocks without candidates.
        NotImplementedError: a named implementation declines the case.
    """
    if candidate_blocks is not None and candidates is None:
        raise ValueError(
            "index_topk: candidate_blocks given without candidates, expected its (block, count)"
        )
    args = (q, weights, keys, visible, candidate_blocks)
    options = {"k": k, "candidates": candidates, "pool": pool}
    return call("index_topk", "select", IMPLEMENTATIONS, implementation, args, options)
