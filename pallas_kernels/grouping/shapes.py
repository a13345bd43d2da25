"""Named cases of grouping: corners, and the pairs of decode and prefill steps of the released
model: 384 experts, six a row; a rank of 64 holds 6."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases import Case
from pallas_kernels.grouped_gemm.shapes import group_sizes

EXPERTS = 384


def _pairs(rng: np.random.Generator, pairs: int, experts: int, spread: str) -> tuple:
    sizes = group_sizes(rng, experts, pairs, spread)
    return (rng.permutation(np.repeat(np.arange(experts + 1), [*sizes, pairs - sizes.sum()])),)


def group(
    name: str,
    pairs: int,
    experts: int = EXPERTS,
    spread: str = "random",
    per_row: int = 6,
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """A case of `group`."""

    def build(rng: np.random.Generator) -> tuple:
        return tuple(x.astype(np.int32) for x in _pairs(rng, pairs, experts, spread))

    options = {"experts": experts, "per_row": per_row}
    return _case(name, "group", build, pairs, options, 16 * pairs, tags)


def table(
    name: str,
    rows: int,
    height: int,
    experts: int = EXPERTS,
    spread: str = "random",
    tags: tuple[str, ...] = ("test",),
) -> Case:
    """A case of `row_tiles`."""

    def build(rng: np.random.Generator) -> tuple:
        return (group_sizes(rng, experts, rows, spread),)

    options = {"rows": rows, "height": height}
    return _case(name, "row_tiles", build, experts, options, 4 * experts, tags)


def _case(name, function, build, count, options, size, tags) -> Case:
    return Case(
        name=name,
        function=function,
        build=build,
        shapes=lambda: (jax.ShapeDtypeStruct((count,), jnp.int32),),
        options=tuple(sorted(options.items())),
        flops=count,
        bytes=size,
        tags=frozenset(tags),
        tolerance=0.0,
        instructions=(),
    )


SPREADS = ("random", "huge", "sparse", "short", "none", "even")
GPU = ("aot", "bench")

CASES: tuple[Case, ...] = (
    *(group(f"group_{spread}", 300, 17, spread) for spread in SPREADS),
    *(group(f"group_released_{spread}", 1000, spread=spread) for spread in SPREADS),
    group("group_one_pair", 1, 6),
    group("group_one_expert", 129, 1, "short", 1),
    group("group_many_experts", 640, 900),
    *(table(f"tiles_{s}_{h}", 100, h, 7, s) for s in SPREADS for h in (8, 16, 128)),
    *(table(f"tiles_released_{spread}", 2304, 24, spread=spread) for spread in SPREADS),
    table("tiles_one_row", 1, 8, 1),
    table("tiles_many_experts", 640, 40, 1000, "sparse"),
    *(group(f"group_{n}", n, tags=GPU) for n in (96, 2304, 9216, 32768)),
    *(group(f"group_{n}_huge", n, spread="huge", tags=GPU) for n in (2304, 32768)),
    *(group(f"group_ep64_{n}", n, 6, "short", tags=GPU) for n in (96, 1536)),
    *(table(f"tiles_{n}", n, h, tags=GPU) for n, h in ((96, 8), (2304, 24), (9216, 40))),
    *(table(f"tiles_393216_{s}", 393216, 248, spread=s, tags=GPU) for s in ("short", "huge")),
    table("tiles_ep64", 1536, 256, 6, tags=GPU),
)
