"""Sparse MLA attention: one shared key-value head, window rows and selected rows, a sink a head.

`attend` is the public function. `IMPLEMENTATIONS` lists the modules behind it in order of
preference; each has an `attend` of the same signature (less `implementation`) and declines a case
it cannot serve by raising NotImplementedError with the reason. The equation is in `reference.py`,
the shapes that every implementation is tested and measured on are in `shapes.py`.
"""

from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import Implementation, call
from pallas_kernels.formats import Rows

IMPLEMENTATIONS = (
    Implementation("blackwell", f"{__name__}.blackwell", ("gpu",), (10, 0), (11, 0)),
    Implementation("hopper", f"{__name__}.hopper", ("gpu",), (9, 0), (10, 0)),
    Implementation("xla", f"{__name__}.xla", ("gpu",)),
    Implementation("reference", f"{__name__}.reference"),
)


def attend(
    q: Float[Array, "r h d"],
    window: Rows,
    window_index: Int32[Array, "r w"],
    selected: Rows | None,
    selected_index: Int32[Array, "r k"] | None,
    sink: Float32[Array, " h"],
    *,
    scale: float,
    invariant: bool = False,
    implementation: str = "auto",
) -> Float[Array, "r h d"]:
    """Attention of every query row over its own keys (V4.1 report 2.3); K = V = the stored row.

    Args:
        q: query rows, bfloat16 or float32, heads of one row share the keys.
        window: rows [n, d], or (values float8_e4m3fn [n, d], scales float8_e8m0fnu [n, d/32]).
        window_index: rows of `window`, oldest first; -1 is an empty slot.
        selected: None, rows [m, d], or (values uint8 [m, d/2] e2m1 low nibble first, scales
            float8_e4m3fn [m, d/16]).
        selected_index: rows of `selected`, ascending; -1 is an empty slot.
        sink: a logit a head that joins the denominator only.
        scale: multiplies q.k, not the sink.
        invariant: a row's bits do not depend on how many rows are in the call.
        implementation: the name of an implementation, or "auto".

    Returns:
        One row a query in q's dtype; 0 where every slot is empty. Empty slots are never read.

    Raises:
        ValueError: an unknown implementation.
        NotImplementedError: a named implementation declines the case.
    """
    args = (q, window, window_index, selected, selected_index, sink)
    options = {"scale": scale, "invariant": invariant}
    return call("mla_attention", "attend", IMPLEMENTATIONS, implementation, args, options)
