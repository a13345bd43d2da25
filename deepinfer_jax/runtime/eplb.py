"""Expert load balancing: recorded expert counts -> replicas -> placement -> an index table.

A trace is x[t, e], tokens routed to logical expert e in step t of one MoE layer. A shard is as slow
as its load, and every step waits for its slowest shard, so what replicas and placement minimise is

    sum over steps t of max over shards r of load[t, r],   load = sum of x[t, e] / replicas(e)

and not the maximum of averages, which hides an expert that is hot in a few steps. ``replicate``
and ``place`` are the greedy steps towards that sum (the objective of DeepInfer 0.1);
``policy="mean"`` is the baseline on averages alone. ``best`` tries all placements of a small case.

The result is data: ``physical`` says which logical expert each slot holds (gather the stacked
weights by it), ``tables`` is the logical-to-slot table that ``model.dispatch.to_physical`` reads.
Nothing is compiled again when they change. ``replay`` compares policies on a recorded trace.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from jaxtyping import Float, Int, Shaped

Trace = Shaped[np.ndarray, "steps experts"]
TIE = 1e-9  # share of the trace's mean load that separates equal steps by total load


@dataclasses.dataclass(frozen=True)
class Assignment:
    """physical: logical expert of each slot, int32 [shards * slots a shard], shard by shard."""

    physical: Int[np.ndarray, " slots"]
    experts: int
    shards: int

    def replicas(self) -> Int[np.ndarray, " experts"]:
        """How many slots hold each expert."""
        return np.bincount(self.physical, minlength=self.experts)

    def loads(self, trace: Trace) -> Float[np.ndarray, "steps shards"]:
        """Tokens each shard receives in each step, an expert's tokens split evenly."""
        share = trace / self.replicas()[None, :]
        per_slot = share[:, self.physical]
        return per_slot.reshape(len(trace), self.shards, -1).sum(axis=2)

    def cost(self, trace: Trace) -> float:
        """Sum over steps of the load of the slowest shard, in tokens."""
        return float(self.loads(trace).max(axis=1).sum())

    def sources(self, before: "Assignment") -> Int[np.ndarray, " slots"]:
        """Where ``before`` held the expert of each slot: on the same shard if it did, int32."""
        room = len(self.physical) // self.shards
        found = np.zeros(len(self.physical), np.int32)
        for slot, expert in enumerate(self.physical):
            held = np.flatnonzero(before.physical == expert)
            near = held[held // room == slot // room]
            found[slot] = slot if slot in held else near[0] if len(near) else held[0]
        return found

    def tables(
        self, width: int | None = None
    ) -> tuple[Int[np.ndarray, "experts replica"], Int[np.ndarray, " experts"]]:
        """Slots of each expert, int32 [experts, width] padded with the first one, and their count.

        width: columns, at least the largest count; fix it to keep the compiled shape.
        """
        count = self.replicas().astype(np.int32)
        width = int(count.max()) if width is None else width
        if width < count.max():
            raise ValueError(f"tables: width {width} < {count.max()} replicas of an expert")
        slots = np.zeros((self.experts, width), np.int32)
        for expert in range(self.experts):
            held = np.flatnonzero(self.physical == expert)
            slots[expert] = held[0]
            slots[expert, : len(held)] = held
        return slots, count


def identity(experts: int, shards: int) -> Assignment:
    """No replicas, experts in order: what a layout does without balancing."""
    return balance(np.ones((1, experts)), shards, policy="none")


def balance(trace: Trace, shards: int, spare: int = 0, policy: str = "sum_of_max") -> Assignment:
    """Replicas for ``spare`` extra slots and a placement of all slots on shards.

    trace: [steps, experts] counts. policy: "sum_of_max", "mean" or "none". Raises ValueError if the
    slots do not divide over the shards, naming the next spare count that does.
    """
    trace = np.asarray(trace, np.float64)
    if trace.ndim != 2 or trace.shape[0] == 0 or not np.isfinite(trace).all() or (trace < 0).any():
        raise ValueError(f"balance: trace must be counts [steps, experts], got {trace.shape}")
    if policy not in POLICIES:
        raise ValueError(f"balance: policy {policy!r}; expected one of {', '.join(POLICIES)}")
    experts = trace.shape[1]
    if (experts + spare) % shards:
        more = spare + -(experts + spare) % shards
        raise ValueError(
            f"balance: {experts} experts + {spare} spare slots do not divide over {shards} shards; "
            f"use {more} spare slots"
        )
    return POLICIES[policy](trace, shards, spare)


def replicate(trace: Trace, spare: int) -> Int[np.ndarray, " experts"]:
    """Replica counts: each spare slot goes where it lowers sum_t max_e x[t, e] / replicas(e) most.

    Ties (an expert that is never the maximum) are broken by the largest load a replica.
    """
    count = np.ones(trace.shape[1], np.int64)
    load = trace.sum(axis=0)
    scale = TIE * max(trace.mean(), 1e-30)
    for _ in range(spare):
        share = trace / count
        top = np.argsort(-share, axis=1, kind="stable")[:, :2]
        steps = np.arange(len(trace))
        first = share[steps, top[:, 0]]
        second = share[steps, top[:, 1]] if trace.shape[1] > 1 else np.zeros(len(trace))
        # Only the maximal expert of a step can lower that step: to its next share or the runner-up.
        lowered = np.maximum(
            trace[steps, top[:, 0]] / (count[top[:, 0]] + 1),
            second,
        )
        gain = np.zeros(trace.shape[1])
        np.add.at(gain, top[:, 0], first - lowered)
        count[np.argmax(gain + scale * load / count / max(load.max(), 1e-30))] += 1
    return count


def place(trace: Trace, count: Int[np.ndarray, " experts"], shards: int) -> Assignment:
    """Slots to shards: heaviest replica first, each to the free shard that keeps
    sum_t max_r load[t, r] lowest (ties: the emptier shard, then the lower number)."""
    room = int(count.sum()) // shards
    share = trace / count
    order = np.repeat(np.arange(len(count)), count)
    order = order[np.argsort(-share.sum(axis=0)[order], kind="stable")]
    loads = np.zeros((len(trace), shards))
    held: list[list[int]] = [[] for _ in range(shards)]
    for expert in order:
        grown = loads + share[:, expert, None]
        # The maximum over the other shards: the largest, or the second where this one is largest.
        top = np.partition(loads, -2, axis=1)[:, -2:] if shards > 1 else np.zeros((len(trace), 2))
        others = np.where(loads >= top[:, 1:], top[:, :1], top[:, 1:])
        value = np.maximum(grown, others).sum(axis=0)
        best = min(
            (shard for shard in range(shards) if len(held[shard]) < room),
            key=lambda shard: (value[shard], loads[:, shard].sum(), shard),
        )
        held[best].append(int(expert))
        loads[:, best] = grown[:, best]
    return _assignment(held, len(count))


def best(trace: Trace, shards: int, spare: int = 0) -> Assignment:
    """The assignment of least cost among all replica counts and placements; small cases only."""
    trace = np.asarray(trace, np.float64)
    experts = trace.shape[1]
    room = (experts + spare) // shards
    found: Assignment | None = None
    for extra in itertools.combinations_with_replacement(range(experts), spare):
        slots = sorted([*range(experts), *extra])
        for held in _partitions(slots, shards, room):
            option = _assignment(held, experts)
            if found is None or option.cost(trace) < found.cost(trace):
                found = option
    if found is None:
        raise ValueError(f"best: {experts} + {spare} slots do not fill {shards} shards evenly")
    return found


def replay(
    trace: Trace,
    shards: int,
    spare: int = 0,
    interval: int = 100,
    window: int = 100,
    policies: tuple[str, ...] = ("none", "mean", "sum_of_max"),
) -> Mapping[str, Mapping[str, float]]:
    """Policies on a recorded trace, each balancing every ``interval`` steps on the last ``window``.

    The first interval runs unbalanced (spare slots repeat the first experts). Returns for each
    policy: cost (tokens on the critical path), ideal (the same with perfect balance), imbalance =
    cost / ideal, and moved (slots whose expert changed over all rebalances: weights that travel).
    """
    trace = np.asarray(trace, np.float64)
    ideal = float(trace.sum() / shards)
    report = {}
    for policy in policies:
        held = balance(trace, shards, spare, "none")
        cost, moved = 0.0, 0
        for start in range(0, len(trace), interval):
            if start and policy != "none":
                seen = trace[max(0, start - window) : start]
                chosen = balance(seen, shards, spare, policy)
                moved += int((chosen.physical != held.physical).sum())
                held = chosen
            cost += held.cost(trace[start : start + interval])
        report[policy] = {
            "cost": cost,
            "ideal": ideal,
            "imbalance": cost / ideal if ideal else 1.0,
            "moved": float(moved),
        }
    return report


def _none(trace: Trace, shards: int, spare: int) -> Assignment:
    experts = trace.shape[1]
    slots = np.arange(experts + spare, dtype=np.int32) % experts
    return Assignment(slots, experts, shards)


def _mean(trace: Trace, shards: int, spare: int) -> Assignment:
    """Greedy on averages: replicate the largest mean share, then pack heaviest to emptiest."""
    mean = trace.mean(axis=0, keepdims=True)
    count = np.ones(trace.shape[1], np.int64)
    for _ in range(spare):
        count[np.argmax(mean[0] / count)] += 1
    room, share = int(count.sum()) // shards, mean[0] / count
    order = np.repeat(np.arange(len(count)), count)
    held: list[list[int]] = [[] for _ in range(shards)]
    loads = np.zeros(shards)
    for expert in order[np.argsort(-share[order], kind="stable")]:
        free = [shard for shard in range(shards) if len(held[shard]) < room]
        emptiest = min(free, key=lambda shard: (loads[shard], shard))
        held[emptiest].append(int(expert))
        loads[emptiest] += share[expert]
    return _assignment(held, len(count))


def _sum_of_max(trace: Trace, shards: int, spare: int) -> Assignment:
    return place(trace, replicate(trace, spare), shards)


POLICIES: dict[str, Callable[[np.ndarray, int, int], Assignment]] = {
    "none": _none,
    "mean": _mean,
    "sum_of_max": _sum_of_max,
}


def _assignment(held: list[list[int]], experts: int) -> Assignment:
    slots = [expert for shard in held for expert in sorted(shard)]
    return Assignment(np.array(slots, np.int32), experts, len(held))


def _partitions(slots: list[int], shards: int, room: int) -> Iterator[list[list[int]]]:
    """Ways to split slots into ``shards`` groups of ``room``; the first slot leads its group."""
    if shards == 0:
        yield []
        return
    if len(slots) != shards * room:
        return
    first, rest = slots[0], slots[1:]
    for others in itertools.combinations(range(len(rest)), room - 1):
        group = [first, *(rest[i] for i in others)]
        left = [slot for i, slot in enumerate(rest) if i not in others]
        for tail in _partitions(left, shards - 1, room):
            yield [group, *tail]
