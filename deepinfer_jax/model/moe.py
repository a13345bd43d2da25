"""Mixture of experts with a shared expert (V4.1 report 2.5; reference Gate, Expert, MoE).

Router, float32: s = sqrt(softplus(x gate^T)); the k experts with the largest s + bias are taken
(ties to the lowest id); weights are s of those, divided by their sum + 1e-20, times
routed_scaling_factor.
Expert: h = weight * silu(min(w1 x, limit)) * clamp(w3 x, +-limit) in float32, y = w2 h; outputs are
summed in float32 in ascending order of expert id, then the shared expert (same clamps, weight 1) is
added.

Rows are sorted by expert and multiplied group by group with the weights as stored.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model import dispatch
from deepinfer_jax.model.capture import Capture
from deepinfer_jax.model.compile import shared
from deepinfer_jax.model.linear import linear_parts, linear_total, rounds_input
from deepinfer_jax.model.norm import Prepared
from deepinfer_jax.model.setup import Setup
from deepinfer_jax.spec import Leaf, Quantized, dense, fp4, fp8_stack, plain
from pallas_kernels import formats, grouped_gemm, quantise, router, row_matmul


@flax.struct.dataclass
class MoEWeights:
    """gate [E, d] bfloat16, bias and bias_vl [E] float32 (bias_vl: image tokens).

    w13 [E, 2, ff, d] (0 gate, 1 up) and w2 [E, d, ff] FP4; shared_w1, shared_w3 [ff, d], shared_w2
    [d, ff] FP8. placement: `dispatch.Placement` of the experts in more than E slots, not a tensor
    of the checkpoint; None where slot e holds expert e.
    """

    gate: Leaf
    bias: Leaf
    bias_vl: Leaf
    w13: Leaf
    w2: Leaf
    shared_w1: Leaf
    shared_w2: Leaf
    shared_w3: Leaf
    placement: Leaf = None


def abstract(cfg: ModelConfig, experts: int) -> MoEWeights:
    """The declared weights of one layer with `experts` routed experts."""
    width, ff, block = cfg.hidden_size, cfg.moe_intermediate_size, cfg.weight_block_size

    def stack(*shape: int, axes: tuple[str | None, ...]) -> Leaf:
        if cfg.expert_dtype == "fp4":
            return fp4(*shape, axes=axes)
        if cfg.expert_dtype == "fp8":
            return fp8_stack(*shape, axes=axes, block=block)
        return plain(*shape, axes=axes)

    def shared(rows: int, cols: int, *axes: str) -> Leaf:
        return dense(rows, cols, axes, block=block, dtype=cfg.dense_dtype)

    return MoEWeights(
        gate=plain(experts, width, axes=(None, "embed")),
        bias=plain(experts, axes=(None,), dtype="float32", scale=0.1),
        bias_vl=plain(experts, axes=(None,), dtype="float32", scale=0.1),
        w13=stack(experts, 2, ff, width, axes=("expert", None, "ffn", None)),
        w2=stack(experts, width, ff, axes=("expert", None, "ffn")),
        shared_w1=shared(ff, width, "ffn", "embed"),
        shared_w2=shared(width, ff, "embed", "ffn"),
        shared_w3=shared(ff, width, "ffn", "embed"),
    )


def moe(
    setup: Setup,
    weights: MoEWeights,
    x: Prepared,
    valid: Bool[Array, " rows"],
    *,
    experts_per_token: int,
    layer: int,
    capture: Capture,
    routes: Int32[Array, "rows k"] | None = None,
) -> Float[Array, "rows d"]:
    """The whole sublayer on normed rows; routes: see `route`."""
    with jax.named_scope("moe"):
        chosen, route_weight = route(setup, weights, x.rows, experts_per_token, routes)
        capture.add("routes", layer, chosen)
        capture.add("route_weights", layer, route_weight)
        routed = routed_experts(setup, weights, x.rows, valid, chosen, route_weight)
        shared = shared_expert(setup, weights, x).astype(jnp.float32)
        return (routed + shared).astype(x.dtype)


@shared("setup", "experts_per_token")
def route(
    setup: Setup,
    weights: MoEWeights,
    x: Float[Array, "rows d"],
    experts_per_token: int,
    routes: Int32[Array, "rows k"] | None = None,
) -> tuple[Int32[Array, "rows k"], Float32[Array, "rows k"]]:
    """Expert ids, ascending, and their weights.

    routes: ids that replace the router's choice, a row of -1 where it decides itself; the weights
    are computed from the router's scores in either case.
    """
    with jax.named_scope("router"):
        parts = row_matmul.partial_products(
            x,
            weights.gate,
            invariant=setup.numerics.invariant,
            implementation=setup.kernels["row_matmul"],
        )
        return router.route(
            parts,
            weights.bias,
            routes,
            k=experts_per_token,
            scale=setup.cfg.routed_scaling_factor,
            implementation=setup.kernels["router"],
        )


@shared("setup")
def routed_experts(
    setup: Setup,
    weights: MoEWeights,
    x: Float[Array, "rows d"],
    valid: Bool[Array, " rows"],
    chosen: Int32[Array, "rows k"],
    route_weight: Float32[Array, "rows k"],
) -> Float32[Array, "rows d"]:
    """Sum over the chosen experts, float32, in ascending order of expert id; 0 for invalid rows.

    With `act_quant` rows travel to other devices' experts as e4m3 with their scales: the experts
    would round them to the same values.
    """
    with jax.named_scope("experts"):
        stacked, w2 = _parts(weights.w13), _parts(weights.w2)
        options = {
            "act_quant": setup.numerics.act_quant,
            "implementation": setup.kernels["grouped_gemm"],
        }

        def mlp(x: Array, source: Array, sizes: Array, weight: Array) -> Array:
            hidden = grouped_gemm.gate_up(
                x, *stacked, sizes, weight, source, limit=setup.cfg.swiglu_limit, **options
            )
            return grouped_gemm.down(hidden, *w2, sizes, **options)

        slots = jnp.where(valid[:, None], chosen, -1)
        if weights.placement is not None:
            slots = dispatch.to_physical(slots, weights.placement, _row_numbers(setup, slots))
        return dispatch.routed(
            x,
            slots,
            route_weight,
            stacked[0].shape[0],
            mlp,
            layout=setup.layout,
            phase=setup.phase,
            exact=setup.numerics.invariant,
            wire=_wire(x.shape[1], x.dtype) if setup.numerics.act_quant else None,
            implementation=setup.kernels["grouping"],
        )


def _row_numbers(setup: Setup, slots: Int32[Array, "rows k"]) -> Int32[Array, " rows"]:
    """Numbers that spread rows over replicas, other ones on each shard of the rows."""
    axes = setup.layout.mesh_axes("rows", setup.phase)
    first = jax.lax.axis_index(axes) if axes else 0
    return jnp.arange(slots.shape[0], dtype=jnp.int32) + first


def _wire(width: int, dtype: jnp.dtype) -> dispatch.Wire:
    """What travels: e4m3 values and one e8m0 byte for 32 channels."""

    def decode(sent: tuple[Array, Array]) -> Array:
        spread = jnp.repeat(sent[1], formats.GROUP, axis=-1)
        rows = formats.apply_e8m0(sent[0].astype(jnp.float32), spread)
        return rows[:, :width].astype(dtype)

    def encode(x: Array) -> tuple[Array, Array]:
        values, scales = formats.quantise_activations(x)
        return values, (jax.lax.bitcast_convert_type(scales, jnp.uint32) >> 23).astype(jnp.uint8)

    return encode, decode


@shared("setup")
def shared_expert(
    setup: Setup, weights: MoEWeights, x: Float[Array, "rows d"] | Prepared
) -> Float[Array, "rows d"]:
    """The expert every row goes through."""
    with jax.named_scope("shared_expert"):
        gate, up = linear_parts(setup, x, (weights.shared_w1, weights.shared_w3))
        hidden = quantise.swiglu(
            gate,
            up,
            limit=setup.cfg.swiglu_limit,
            dtype=x.dtype,
            act_quant=rounds_input(setup, weights.shared_w2),
            implementation=setup.kernels["quantise"],
        )
        # Made for this one weight: either way is the way that it takes.
        return linear_total(setup, Prepared(hidden, hidden), weights.shared_w2, "ffn")


def _parts(weight: Leaf) -> tuple[Leaf, Leaf | None]:
    return (weight.values, weight.scales) if isinstance(weight, Quantized) else (weight, None)
