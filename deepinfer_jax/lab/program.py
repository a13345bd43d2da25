"""What one device does in a traced program: products, bytes, collectives. No compiler, no devices.

``measure`` walks a jaxpr. Inside ``shard_map`` shapes are those of one device and collectives name
their mesh axes and true types, so nothing has to be read back from compiled text; a scan's body
counts ``length`` times; a while loop whose trips depend on data counts one trip and is marked.
Programs that leave sharding to the compiler have their collectives added later: see ``hlo``.

- products: 2 m n k for each dot, by operand type.
- touched: bytes of each argument that must be read or written: all of it, or, if it is only
  indexed, what the gathers and updates move (never more than all of it).
- traffic: bytes that results of products, gathers, reductions, sorts and collectives move through
  memory; elementwise operations are taken as fused within a named scope and stored at its border.
- peak: most bytes of such results alive at one time.

Kernels of ``pallas_kernels`` count what they must do at least (``kernels.Costs``).
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import pallas_kernels
from deepinfer_jax.lab.collectives import Collective
from deepinfer_jax.lab.kernels import NAME, Cost, Costs
from deepinfer_jax.spec import path_name

KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}
ALIASES = {"reshape", "bitcast_convert_type", "squeeze", "expand_dims"}
INDEXED = {"gather", "dynamic_slice"}
Number = int | float
SMALL_SUM = 16
MEMORY = {
    *("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "pallas_call"),
    *("gather", "dynamic_slice", "dynamic_update_slice", "sort", "top_k"),
    *("argmax", "argmin", "cumsum", "cummax", "cumlogsumexp"),
}


@dataclasses.dataclass
class Work:
    """Sums for one device and one execution. products: FLOP by operand type. touched: bytes by
    argument path, next to the argument's local size in ``held``."""

    products: dict[str, float] = dataclasses.field(default_factory=dict)
    touched: dict[str, float] = dataclasses.field(default_factory=dict)
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    traffic: float = 0.0
    peak: int = 0
    collectives: list[Collective] = dataclasses.field(default_factory=list)


def measure(function: Callable[..., Any], args: tuple, costs: Costs | None = None) -> Work:
    """Trace ``function`` on abstract arguments (ShapeDtypeStruct trees) and count."""
    costs = costs or Costs()
    with pallas_kernels.stand_in(costs):
        # A function of its own: jax keeps traces, and this one must neither be found where the
        # real kernels are wanted nor an earlier one be found here.
        closed = jax.jit(lambda *args: function(*args)).trace(*args).jaxpr
    paths, _ = jax.tree_util.tree_flatten_with_path(args)
    names = [path_name(path) for path, _ in paths]
    walk = _Walk(costs)
    env = {}
    for name, var in zip(names, closed.jaxpr.invars, strict=True):
        walk.work.held[name] = _bytes(var.aval)
        walk.work.touched[name] = 0.0
        env[var] = _Value(_bytes(var.aval), argument=name)
    walk.jaxpr(closed.jaxpr, env, 1, "", False)
    for name, size in walk.work.held.items():
        walk.work.touched[name] = min(walk.work.touched[name], size)
    return walk.work


@dataclasses.dataclass(eq=False)
class _Value:
    """What the walk knows of a variable. argument: the argument it is a view of. sources: stored
    values it is computed from by elementwise operations (itself once it is stored)."""

    size: int
    scope: str = ""
    argument: str | None = None
    sources: frozenset["_Value"] = frozenset()
    stored: bool = False


class _Walk:
    def __init__(self, costs: Costs):
        self.costs = costs
        self.work = Work()
        self.alive: set[_Value] = set()

    def jaxpr(self, jaxpr: Any, env: dict, times: Number, scope: str, dynamic: bool) -> None:
        """Count the equations of a body whose inputs are in ``env``; adds its other variables."""
        last = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.invars if _is_var(var)}
        last |= {var: len(jaxpr.eqns) for var in jaxpr.outvars if _is_var(var)}
        for var in jaxpr.constvars:
            env[var] = _Value(_bytes(var.aval), stored=True)
        outside, until = set(env.values()), {}
        used = _used(jaxpr)
        for i, eqn in enumerate(jaxpr.eqns):
            if not used[i]:
                continue
            self.equation(eqn, env, times, _join(scope, eqn), dynamic)
            self.work.peak = max(self.work.peak, sum(value.size for value in self.alive))
            for var in eqn.outvars:
                for value in {env[var], *env[var].sources} - outside:
                    until[value] = max(until.get(value, -1), last.get(var, i))
            self.alive -= {value for value in self.alive if until.get(value, i + 1) <= i}

    def equation(self, eqn: Any, env: dict, times: Number, scope: str, dynamic: bool) -> None:
        name = eqn.primitive.name
        inputs = [env[var] if _is_var(var) else None for var in eqn.invars]
        if inputs and inputs[0] is not None:
            argument = inputs[0].argument is not None
            if name in ALIASES or (argument and name in ("transpose", "copy")):
                env[eqn.outvars[0]] = inputs[0]
                return
        cost = self._cost(eqn)
        if cost is None and (inner := list(_bodies(eqn))):
            self._enter(eqn, inner, env, times, scope, dynamic)
            return
        heavy = cost is not None or _heavy(eqn)
        read: set[_Value] = set()
        for value in inputs:
            if value is None or value.argument:
                continue
            # Elementwise chains are fused within one named scope and stored where they leave it;
            # a kernel's inputs are always stored.
            if not value.stored and (value.scope != scope or cost is not None):
                self._store(value, times)
            read |= {value} if value.stored else value.sources
        if cost is not None:
            self._kernel(cost, inputs, times)
        else:
            self._touch(eqn, inputs, times)
            if heavy:
                self.work.traffic += times * sum(value.size for value in read)
        if name == "dot_general":
            self._product(eqn, times)
        elif name == "pallas_call" and eqn.params.get("cost_estimate") is not None:
            self._add_product("bf16", times * eqn.params["cost_estimate"].flops)
        elif name in KINDS:
            self._collective(eqn, times, scope, dynamic)
        updated = _updated(eqn)
        for var in eqn.outvars:
            value = _Value(_bytes(var.aval), scope, sources=frozenset(read))
            if updated is not None and inputs[0] is not None and inputs[0].argument:
                value = inputs[0]
            elif heavy:
                self._store(value, times)
            env[var] = value

    def _store(self, value: _Value, times: Number) -> None:
        value.stored, value.sources = True, frozenset()
        self.work.traffic += times * value.size
        self.alive.add(value)

    def _enter(self, eqn, inner, env, times, scope, dynamic) -> None:
        loop = eqn.primitive.name in ("while", "scan")
        for body, offset, trips, is_dynamic in inner:
            below = {}
            operands = eqn.invars[offset : offset + len(body.invars)]
            for outer, var in zip(operands, body.invars, strict=True):
                value = env[outer] if _is_var(outer) else None
                if value is None or (loop and not value.argument):
                    value = _Value(_bytes(var.aval), scope, stored=True)
                elif value.argument and eqn.primitive.name == "shard_map":
                    self.work.held[value.argument] = _bytes(var.aval)
                below[var] = value
            self.jaxpr(body, below, times * trips, scope, dynamic or is_dynamic)
            for outer, var in zip(eqn.outvars, body.outvars, strict=False):
                value = below.get(var) if _is_var(var) else None
                if value is None or (loop and not value.argument):
                    value = _Value(_bytes(outer.aval), scope, stored=True)
                env[outer] = value

    def _touch(self, eqn, inputs, times) -> None:
        updated = _updated(eqn)
        for position, value in enumerate(inputs):
            if value is None or value.argument is None:
                continue
            if position == 0 and eqn.primitive.name in INDEXED:
                moved = times * _bytes(eqn.outvars[0].aval)
            elif position == 0 and updated is not None:
                moved = times * _bytes(updated.aval)
            else:
                moved = math.inf
            self.work.touched[value.argument] += moved

    def _product(self, eqn, times) -> None:
        left, right = (var.aval for var in eqn.invars[:2])
        (contract, _), _ = eqn.params["dimension_numbers"]
        k = math.prod(left.shape[axis] for axis in contract)
        widest = max(left.dtype.itemsize, right.dtype.itemsize)
        kind = {1: "fp8", 2: "bf16"}.get(widest, "f32")
        self._add_product(kind, times * 2 * k * math.prod(eqn.outvars[0].aval.shape))

    def _add_product(self, kind: str, count: Number) -> None:
        self.work.products[kind] = self.work.products.get(kind, 0.0) + count

    def _collective(self, eqn, times, scope, dynamic) -> None:
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        kind = KINDS[eqn.primitive.name]
        # A ragged exchange has its result and offsets as operands too; only the rows in use travel.
        ragged = kind == "ragged-all-to-all"
        sides = eqn.outvars if kind == "all-gather" else eqn.invars[:1] if ragged else eqn.invars
        for var in sides:
            size = round(_bytes(var.aval) * (self.costs.used if ragged else 1))
            self.work.collectives.append(Collective(kind, axes, size, round(times), scope, dynamic))

    def _cost(self, eqn) -> Cost | None:
        name = str(eqn.params.get("name", ""))
        return self.costs.found[int(name.removeprefix(NAME))] if name.startswith(NAME) else None

    def _kernel(self, cost: Cost, inputs, times) -> None:
        for kind, flop in cost.flop.items():
            self._add_product(kind, times * flop)
        for value, read in zip(inputs, cost.read, strict=True):
            if value is not None and value.argument:
                self.work.touched[value.argument] += times * read
            else:
                self.work.traffic += times * read


def _bodies(eqn: Any):
    """(jaxpr, first operand that binds to it, trips, trips depend on data) of an equation."""
    name, params = eqn.primitive.name, eqn.params
    if name == "pallas_call":
        return
    if name == "while":
        first = params["cond_nconsts"]
        trips = _counted(eqn)
        yield params["body_jaxpr"].jaxpr, first, trips or 1, trips is None
    elif name == "scan":
        yield params["jaxpr"].jaxpr, 0, params["length"], False
    elif name == "cond":
        sizes = [len(branch.jaxpr.eqns) for branch in params["branches"]]
        yield params["branches"][int(np.argmax(sizes))].jaxpr, 1, 1, False
    elif name not in KINDS and not name.startswith(("scatter", "reduce", "sort", "custom_lin")):
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if key in params:
                body = params[key]
                yield getattr(body, "jaxpr", body), 0, 1, False
                return


def _used(jaxpr: Any) -> list[bool]:
    """Which equations the outputs need; the compiler drops the others."""
    needed = {var for var in jaxpr.outvars if _is_var(var)}
    used = []
    for eqn in reversed(jaxpr.eqns):
        lasting = any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
        used.append(lasting or any(var in needed for var in eqn.outvars))
        if used[-1]:
            needed.update(var for var in eqn.invars if _is_var(var))
    return used[::-1]


def _counted(eqn: Any) -> int | None:
    """Trips of a while loop that counts a constant number of times from zero, else None."""
    condition = eqn.params["cond_jaxpr"].jaxpr
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return None
    bound = condition.eqns[0].invars[1]
    return int(bound.val) if hasattr(bound, "val") and bound.aval.dtype.kind == "i" else None


def _heavy(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name.startswith("reduce_") and "axes" in eqn.params:
        # Sums over a few entries are computed inside elementwise loops.
        shape = eqn.invars[0].aval.shape
        return math.prod(shape[axis] for axis in eqn.params["axes"]) > SMALL_SUM
    return name in MEMORY or name in KINDS or name.startswith("scatter")


def _updated(eqn: Any) -> Any:
    """The operand an in-place update writes, or None."""
    if eqn.primitive.name.startswith("scatter"):
        return eqn.invars[2]
    return eqn.invars[1] if eqn.primitive.name == "dynamic_update_slice" else None


def _join(scope: str, eqn: Any) -> str:
    """Named scopes around an equation, without layer numbers and without the wrapping calls."""
    parts = [*scope.split("/"), *str(eqn.source_info.name_stack).split("/")]
    kept = [
        part
        for part in parts
        if part
        and not re.fullmatch(
            r"layer_\d+|\w*\(.*\)|while|body|cond|eval_jaxpr|closed_call|shard_map|branch_\d+_fun",
            part,
        )
    ]
    return "/".join(kept)


def _is_var(var: Any) -> bool:
    return not hasattr(var, "val")


def _bytes(aval: Any) -> int:
    shape: Mapping | tuple = getattr(aval, "shape", ())
    dtype = getattr(aval, "dtype", None)
    return math.prod(shape) * dtype.itemsize if isinstance(dtype, np.dtype) else 0
