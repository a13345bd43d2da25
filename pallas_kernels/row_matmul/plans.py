"""How a row product is cut on Hopper: parts of K, rows of a tile and height of a weight tile.

    time = LAUNCH + rounds (steps of a part x time of a step + time of an item) + sum of the parts
    rounds = ceil(row tiles x weight tiles x parts / blocks)

With few rows an item is a chain of steps that wait for memory and for each other, so parts of K and
short weight tiles that give every multiprocessor an item are worth a second launch and float32
partials; with many rows they are not. The constants are estimates: those of FP8 and bf16 with two
warpgroups are a fit to the times measured on an H200 for the released weights at 16 to 4,096 rows
(docs/benchmarks.md; 5% off, the bf16 router at 4,096 rows 7%); other heights and float32 scale them
by what a step issues, and have not been timed.
"""

import functools
import math

import jax.numpy as jnp

from pallas_kernels.tiles import STEP, Plan, Product, deep_enough

LAUNCH = 1.8
SECOND = 2.0
"""Microseconds of the launch that adds the parts; none where it is fused into what follows."""
ITEM, ITEM_ROW = 1.85, 0.0065
"""Microseconds to fill the rings and to store: an item, and each of its rows."""
STEPS = {"fp8": (0.4, 0.08, 0.0014), "bf16": (0.17, 0.04, 0.0025), "f32": (0.4, 0.1, 0.0042)}
"""Microseconds of a step: always, a warpgroup, a warpgroup and row."""
RATE = 4e6
"""Bytes of memory in a microsecond."""
LEAST = 4
"""Steps of a part; fewer would be all filling and storing."""
PARTIALS = 1024
"""Most partial sums a row that a float32 weight takes with one cut for every number of rows."""


def heights(kind: str) -> tuple[int, ...]:
    """Warpgroups that a block may have, the usual number first."""
    return {"fp8": (2, 1, 3, 4), "bf16": (2, 1)}.get(kind, (1,))


def most_rows(kind: str, groups: int) -> int:
    """Rows of a tile whose accumulator leaves a thread enough registers (no spills up to here)."""
    return 128 if kind == "f32" else {3: 64, 4: 32}.get(groups, 256)


def possible_parts(k: int) -> list[int]:
    """Ways to cut K into equal parts of whole steps."""
    steps = k // STEP
    return [n for n in range(1, steps + 1) if steps % n == 0 and (n == 1 or steps // n >= LEAST)]


def parts_of_k(kind: str, channels: int, k: int) -> int:
    """Parts of K for every number of rows: a function of the weight alone."""
    if kind == "f32":
        return max(n for n in possible_parts(k) if n == 1 or n * channels <= PARTIALS)
    tiles, steps = -(-channels // 128), k // STEP
    wanted = 16 if tiles == 1 else 4 if tiles <= 4 else 2 if tiles <= 12 else 1
    while wanted > 1 and (steps % wanted or steps // wanted < LEAST):
        wanted //= 2
    return wanted


def microseconds(
    kind: str, rows: int, channels: int, k: int, parts: int, plan: Plan, matrices: int = 1
) -> float:
    """Estimated time of the product and of the sum of its parts.

    Args:
        rows, channels: of one matrix.
        matrices: each with as many rows of its own.
    """
    always, group, row = STEPS[kind]
    step = always + plan.groups * (group + row * plan.rows)
    tiles = matrices * -(-channels // plan.height) * -(-rows // plan.rows)
    rounds = math.ceil(tiles * parts / plan.blocks)
    item = k // STEP // parts * step + ITEM + ITEM_ROW * plan.rows
    results = matrices * rows * channels
    stored = matrices * channels * k * {"fp8": 1, "bf16": 2, "f32": 4}[kind]
    partials = 4 * parts * results if parts > 1 else 0
    time = LAUNCH + max(rounds * item, (stored + partials) / RATE)
    return time + (SECOND + (partials + 2 * results) / RATE if parts > 1 else 0)


@functools.lru_cache(maxsize=4096)
def best(
    kind: str, rows: int, channels: int, k: int, parts: int | None = None, matrices: int = 1
) -> tuple[int, Plan]:
    """The cut of least estimated time; `parts` says how many parts of K there must be."""
    product = Product(kind, rows, k, channels, out_dtype=jnp.float32)  # takes the most memory
    found = []
    for groups in heights(kind):
        if matrices > 1 and channels % (64 * groups):
            continue
        for tile in range(8, min(most_rows(kind, groups), -(-rows // 8) * 8) + 1, 8):
            plan = Plan(tile, groups)
            if not deep_enough(plan, product):
                continue
            found += [(n, plan) for n in ([parts] if parts else possible_parts(k))]
    return min(
        found, key=lambda cut: microseconds(kind, rows, channels, k, cut[0], cut[1], matrices)
    )
