"""Pictures of sweeps: the Pareto front of decode, and prefill over tokens a step.

    decode    tokens/s of one request against tokens/s of the device: what a larger batch or more
              verified rows buy, and what they cost the user; the front is drawn as a line
    prefill   tokens/s of the device, and the share of the bf16 product it reaches

Only points that were run are drawn. Needs matplotlib (the extra `plot`).
"""

from collections.abc import Sequence
from typing import Any

Point = tuple[float, float]


def front(points: Sequence[Point]) -> list[Point]:
    """Points that no other one beats in both coordinates, by the first one."""
    kept: list[Point] = []
    for point in sorted(points, reverse=True):
        if not kept or point[1] > kept[-1][1]:
            kept.append(point)
    return kept[::-1]


def decode_points(records: Sequence[dict[str, Any]]) -> dict[int, list[Point]]:
    """Rows a request -> (tokens/s of a request, tokens/s of the device)."""
    found: dict[int, list[Point]] = {}
    for one in records:
        if one.get("phase") == "decode" and one.get("tokens_s"):
            rate, rows = one["tokens_s"], one["rows"]
            found.setdefault(rows["width"], []).append((rate / rows["sequences"], rate))
    return found


def draw(records: Sequence[dict[str, Any]], png: str) -> None:
    """The picture of all records, a panel a phase. Raises ValueError if none was run."""
    decode = decode_points(records)
    prefill = [one for one in records if one.get("phase") == "prefill" and one.get("tokens_s")]
    if not decode and not prefill:
        raise ValueError("plot: no record with tokens a second (decode needs --acceptance)")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = bool(decode) + bool(prefill)
    figure, grid = pyplot.subplots(1, panels, figsize=(7 * panels, 5), squeeze=False)
    axes = list(grid[0])
    if decode:
        _decode(axes.pop(0), decode)
    if prefill:
        _prefill(axes.pop(0), prefill)
    first = records[0].get("environment", {})
    figure.suptitle(f"{first.get('device')}, jax {first.get('jax')}, {records[0].get('model')}")
    figure.savefig(png, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _decode(axes: Any, found: dict[int, list[Point]]) -> None:
    for width, points in sorted(found.items()):
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, marker="o", linewidth=0.8, label=f"{width} rows a request")
    x, y = zip(*front([point for points in found.values() for point in points]), strict=True)
    axes.plot(x, y, color="black", linestyle="--", linewidth=1, label="Pareto front")
    axes.set(xlabel="tokens/s of a request", ylabel="tokens/s of the device", title="decode")
    axes.grid(True, linewidth=0.3)
    axes.legend(fontsize=8)


def _prefill(axes: Any, found: Sequence[dict[str, Any]]) -> None:
    found = sorted(found, key=lambda one: one["tokens_per_turn"])
    x = [one["tokens_per_turn"] for one in found]
    axes.plot(x, [one["tokens_s"] for one in found], marker="o", color="C0")
    axes.set(xscale="log", xlabel="tokens a step", ylabel="tokens/s of the device", title="prefill")
    axes.grid(True, which="both", linewidth=0.3)
    share = axes.twinx()
    share.plot(x, [one["reached"]["of_arithmetic"] for one in found], marker="x", color="C1")
    share.set(ylabel="share of the measured bf16 product", ylim=(0, 1))
