"""Which implementation a call takes, and how that is reported."""

import importlib

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import Implementation, Kernels, Target, bench


def sds(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


ARGS = (
    sds((12, 64), jnp.bfloat16),
    sds((4, 2, 32, 32), jnp.uint8),
    sds((4, 2, 32, 2), jnp.float8_e8m0fnu),
    sds((4,), jnp.int32),
    sds((12,), jnp.float32),
)


def test_auto_is_the_default_and_hashable():
    assert Kernels.auto() == Kernels.parse("auto") == Kernels.parse({})
    assert {Kernels.auto(): 1}[Kernels()] == 1
    assert Kernels.auto()["mla_attention"] == "auto"
    assert list(Kernels.auto()) == list(pallas_kernels.OPERATIONS)


def test_parse_takes_one_name_a_mapping_json_and_itself():
    one = Kernels.parse("reference")
    assert all(name == "reference" for name in one.values())
    some = Kernels.parse({"row_matmul": "reference", "grouped_gemm": "xla"})
    assert some == Kernels.parse('{"grouped_gemm": "xla", "row_matmul": "reference"}')
    assert hash(some) == hash(Kernels.parse(dict(some.named)))
    assert Kernels.parse(some) is some


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"gemm": "xla"}, "no operation 'gemm'"),
        ({"row_matmul": "cuda"}, "kernels.row_matmul: no implementation 'cuda'"),
        ({"index_topk": "xla"}, "no implementation 'xla'; expected one of auto, hopper, r"),
        ("fast", "kernels.mla_attention: no implementation 'fast'"),
        ("xla", "kernels.index_topk: no implementation 'xla'"),
        ("blackwell", "kernels.index_topk: no implementation 'blackwell'; expected one of auto, "),
        ("hopper_fp8", "kernels.mla_attention: no implementation 'hopper_fp8'"),
        ('{"row_matmul": xla}', 'is not JSON .*; expected {"operation": "implementation", ...}$'),
    ],
)
def test_mistakes_name_both_sides(value, message):
    with pytest.raises(ValueError, match=message):
        Kernels.parse(value)


def test_names_are_those_of_the_implementations():
    for op, names in pallas_kernels.NAMES.items():
        package = importlib.import_module(f"pallas_kernels.{op}")
        assert tuple(i.name for i in package.IMPLEMENTATIONS) == names


def test_choice_on_this_platform():
    choice = pallas_kernels.choose("grouped_gemm", "gate_up", *ARGS, limit=10.0, act_quant=False)
    assert choice.chosen == "xla"
    assert "gate_up" in str(choice) and "bfloat16[12,64]" in str(choice)


def test_rows_are_quantised_by_the_reference_where_there_is_no_kernel():
    choice = pallas_kernels.choose("quantise", "round_trip", sds((12, 256), jnp.bfloat16))
    assert choice.chosen == "reference"
    assert choice.declined == (("hopper", "needs platform gpu, this is cpu"),)


def test_record_collects_calls_in_order():
    from pallas_kernels import grouped_gemm, row_matmul

    def step(x, values, scales, sizes, route, w):
        h = grouped_gemm.gate_up(
            x, values, scales, sizes, route, limit=10.0, act_quant=False, implementation="reference"
        )
        return row_matmul.matmul(h, w, out_dtype=jnp.float32)

    with pallas_kernels.record() as choices:
        jax.eval_shape(step, *ARGS, sds((8, 32), jnp.bfloat16))
    assert [(c.op, c.chosen) for c in choices] == [
        ("grouped_gemm", "reference"),
        ("row_matmul", "reference"),
    ]


def test_a_named_implementation_does_not_fall_back():
    with pytest.raises(ValueError, match="expected auto, "):
        pallas_kernels.call(
            "grouped_gemm", "gate_up", (Implementation("xla", "x"),), "hopper", (), {}
        )


def test_declines_are_listed_and_the_next_is_tried():
    implementations = (
        Implementation("hopper", "nowhere", ("gpu",), (9, 0), (10, 0)),
        Implementation("xla", __name__),
        Implementation("reference", __name__),
    )
    with pallas_kernels.record() as choices:
        assert (
            pallas_kernels.call(
                "row_matmul", "second_only", implementations, "auto", (_Second(),), {}
            )
            == "taken"
        )
        with pytest.raises(NotImplementedError, match="always: no luck|no luck"):
            pallas_kernels.call("row_matmul", "never", implementations, "auto", (), {})
    assert [name for name, _ in choices[0].declined] == ["hopper", "xla"]
    assert "needs platform gpu" in choices[0].declined[0][1]
    assert choices[1].chosen is None


class _Second:
    calls = 0


def second_only(state):
    state.calls += 1
    if state.calls == 1:
        raise NotImplementedError("first time")
    return "taken"


def never():
    raise NotImplementedError("no luck")


@pytest.mark.parametrize(
    ("target", "misfit"),
    [
        (Target("gpu", (9, 0)), None),
        (Target("gpu", (8, 0)), "needs compute capability 9.0, this is 8.0"),
        (Target("gpu", (10, 0)), "made for compute capability below 10.0"),
        (Target("cpu"), "needs platform gpu, this is cpu"),
    ],
)
def test_capability_limits(target, misfit):
    hopper = Implementation("hopper", "nowhere", ("gpu",), (9, 0), (10, 0))
    reason = hopper.misfit(target)
    assert (reason is None) if misfit is None else misfit in reason


def test_bench_times_cases_and_writes_rows(tmp_path):
    best = bench.ceilings(runs=2, side=64, copy_bytes=1 << 12)
    assert best.tflops > 0 and best.tbs > 0
    wanted = {"bf16_small", "gate_up_one_row"}
    rows = list(
        bench.run(
            ("grouped_gemm", "row_matmul"), only=lambda c: c.name in wanted, runs=3, best=best
        )
    )
    assert {row.case for row in rows} == wanted
    assert all(row.median_us and row.low_us <= row.median_us <= row.high_us for row in rows)
    declined = list(
        bench.run(
            ("row_matmul",),
            implementations=("hopper",),
            only=lambda c: c.name == "one_row",
            runs=1,
            best=best,
        )
    )
    assert "needs platform gpu" in declined[0].note and declined[0].median_us is None
    bench.write_csv(rows + declined, tmp_path / "rows.csv")
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert lines[0].startswith("op,case,implementation,median_us") and len(lines) == 4
    pytest.importorskip("matplotlib")
    bench.plot_roofline(rows + declined, best, tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_names_an_unknown_operation():
    with pytest.raises(ValueError, match="no operation 'gemm'"):
        next(bench.run(("gemm",), best=bench.Ceilings(1.0, 1.0)))
