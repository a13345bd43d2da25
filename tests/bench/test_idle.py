"""Device idle time: from operations written down by hand, and from a profile recorded here."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from deepinfer_jax.bench import idle
from deepinfer_jax.bench.idle import Op


def step(start: float, run: int | None, module: str = "jit_turn") -> list[Op]:
    """Two operations with a gap of 10 between them: 40 and 50 long."""
    name = None if run is None else (module, run)
    return [Op(start, start + 40, module, name), Op(start + 50, start + 100, module, name)]


def test_gaps_inside_and_between_runs() -> None:
    found = idle.measure(step(0, 1) + step(130, 2) + step(230, 3), "jit_turn")
    assert found.span == pytest.approx(330e-9) and found.busy == pytest.approx(270e-9)
    assert found.idle == pytest.approx(60 / 330)
    assert found.between == pytest.approx(30 / 330)
    assert found.runs == 3


def test_another_program_fills_a_gap_and_a_parallel_one_hides_it() -> None:
    ops = step(0, 1) + step(150, 2) + [Op(100, 120, "jit_admit", ("jit_admit", 9))]
    assert idle.measure(ops, "jit_turn").between == pytest.approx(30 / 250)
    ops.append(Op(20, 145, "jit_admit", ("jit_admit", 10)))
    found = idle.measure(ops, "jit_turn")
    assert found.idle == pytest.approx((5 + 10) / 250), "before run 2 and inside it"
    assert found.between == pytest.approx(5 / 250)


def test_what_lies_outside_the_module_is_not_looked_at() -> None:
    around = [Op(-900, -800, "jit_other", ("jit_other", 1)), Op(900, 990, "", None)]
    inside = [Op(100, 115, "", None)]
    found = idle.measure(step(0, 1) + step(130, 2) + around + inside, "jit_turn")
    assert found.span == pytest.approx(230e-9)
    assert found.idle == pytest.approx(35 / 230)
    assert found.between is None and found.runs is None, "a copy belongs to no run"


def test_without_runs_only_the_bound_is_known() -> None:
    found = idle.measure(step(0, None) + step(130, None))
    assert found.idle == pytest.approx(50 / 230) and found.between is None


def test_a_module_that_did_not_run_is_named() -> None:
    with pytest.raises(ValueError, match=r"jit_decode.*there are jit_turn"):
        idle.measure(step(0, 1), "jit_decode")


def test_the_ranking_joins_what_differs_by_a_number_only() -> None:
    names = ("product_fp8_64x32_1", "fusion.7", "product_fp8_64x32_2", "copy", "fusion.8")
    ops = [Op(100 * i, 100 * i + 10 * (i + 1), "", None, name) for i, name in enumerate(names)]
    first, second, others = idle.ranking(ops, turns=2, most=2)
    assert first == ("fusion", 1.0, pytest.approx(35e-9), pytest.approx(70 / 150))
    assert second == ("product_fp8_64x32", 1.0, pytest.approx(20e-9), pytest.approx(40 / 150))
    assert others == ("others", 0.5, pytest.approx(20e-9), pytest.approx(40 / 150))
    assert len(idle.ranking(ops, turns=1, most=3)) == 3, "nothing is left over"


def test_the_ranking_keeps_the_shapes_that_our_kernels_are_named_after() -> None:
    """A name must not end like the number that a compiler adds."""
    root = Path(pallas_kernels.__file__).parent
    written = [
        name
        for path in root.rglob("*.py")
        for name in re.findall(r'kernel_name=f?"(.*)",$', path.read_text(), re.MULTILINE)
    ]
    names = [re.sub(r"{[^}]*}", "16", name) for name in written]
    assert len(names) >= 10
    assert [idle.ranking([Op(0, 1, "", None, name)], turns=1)[0].kernel for name in names] == names


def test_a_profile_recorded_here(tmp_path: Path) -> None:
    @jax.jit
    def turn(x: jax.Array) -> jax.Array:
        return jnp.sort(jnp.tanh(x @ x), axis=0)

    x = jax.block_until_ready(turn(jnp.ones((128, 128))))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(4):
            x = turn(x)
        jax.block_until_ready(x)
    ops = idle.read(tmp_path)
    assert {op.module for op in ops} == {"jit_turn"}
    found = idle.measure(ops, "jit_turn")
    assert found.runs == 4
    assert 0 < found.busy <= found.span
    assert found.between is not None and 0 <= found.between <= found.idle < 1


class _Named:
    """Planes, lines and events as jax's profile has them."""

    def __init__(self, name: str, parts: list | None = None, **fields: object) -> None:
        self.name = name
        self.planes = self.lines = self.events = parts or []
        self.__dict__ |= fields


def _event(start: float, length: float, **stats: object) -> _Named:
    return _Named("kernel", start_ns=start, duration_ns=length, stats=stats.items())


def test_streams_of_a_gpu() -> None:
    """Everything on the first device's streams is work; summary lines and hosts' calls are not."""
    labelled = _event(0, 40, hlo_module="jit_turn", hlo_op="dot.1")
    streams = [
        _Named("Stream #14(Compute)", [labelled, _event(50, 50)]),
        _Named("Stream #15(MemcpyD2H)", [_event(30, 15)]),
        _Named("XLA Modules", [_event(0, 100, hlo_module="jit_turn")]),
    ]
    planes = [
        _Named("/host:CPU", [_Named("python", [_event(0, 500)])]),
        _Named("/device:GPU:1", [_Named("Stream #1", [_event(0, 900)])]),
        _Named("/device:GPU:0", streams),
    ]
    ops = list(idle._ops(_Named("profile", planes)))
    assert sorted(op.end for op in ops) == [40, 45, 100]
    found = idle.measure(ops)
    assert found.idle == pytest.approx(5 / 100) and found.between is None
    assert idle.busiest(ops) == "jit_turn"
    assert idle.busiest([Op(0, 9, "", None)]) is None


def test_no_profile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="xplane"):
        idle.read(tmp_path)
