"""Layout files: what they mean, and every mistake as an error that names both sides."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from deepinfer_jax.layout import AXES, PHASES, Layout

TEXT = """
description = "a test"
moe_dispatch = "alltoall"
engram = "host"
[mesh]
data = 4
expert = 16
tensor = 1
[rules]
rows = ["data", "expert"]
expert = ["data", "expert"]
heads = "tensor"
vocab = "expert"
embed = []
engram_rows = "data"
[prefill]
rows = "data"
"""


def read(tmp_path, text=TEXT, **axes):
    path = tmp_path / "probe.toml"
    path.write_text(text)
    return Layout.from_toml(path, axes=axes)


def test_specs(tmp_path):
    under = read(tmp_path, data=2, expert=4)
    assert (under.name, under.size, under.moe_dispatch) == ("probe", 8, "alltoall")
    assert under == read(tmp_path, data=2, expert=4) and hash(under) == hash(
        read(tmp_path, data=2, expert=4)
    )
    spec = under.spec(("expert", None, "ffn", None), (64, 2, 32, 16), name="w13")
    assert spec == P(("data", "expert"))
    assert under.spec(("heads", "q_rank"), (7, 16)) == P(), "a mesh axis of size one is dropped"
    assert under.spec((None, "vocab"), (3, 8)) == P(None, "expert")
    assert under.spec(("rows", "embed"), (8, 3), phase="prefill") == P("data")
    assert under.spec(("rows", "embed"), (8, 3), phase="decode") == P(("data", "expert"))
    assert (under.ways("rows"), under.ways("rows", "prefill"), under.ways("kv")) == (8, 2, 1)


def test_placement(tmp_path):
    under = read(tmp_path, data=2, expert=4)
    mesh = under.mesh()
    assert mesh.devices.shape == (2, 4, 1)
    held = jax.device_put(np.zeros((16, 4)), under.sharding(("engram_rows", None), (16, 4), mesh))
    assert held.sharding.memory_kind == "pinned_host"
    sharding = under.sharding(("rows", None), (8, 4), mesh, phase="prefill")
    assert jax.device_put(np.zeros((8, 4)), sharding).sharding.spec == P("data")


def test_single():
    under = Layout.single()
    assert under.size == 1 and under.spec(("rows", "embed"), (3, 5)) == P()
    assert under.mesh().size == 1


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (("experts",), (64,), "w, logical axis: unknown 'experts' .did you mean 'expert'"),
        (
            ("expert", "rows"),
            (64, 64),
            "w: 'expert' and 'rows' are both mapped to mesh axis 'data'",
        ),
        (("vocab",), (37,), "w: axis 'vocab' of size 37 does not divide over expert=4"),
        (("vocab",), (8, 8), r"w: 1 axes \('vocab',\) for shape \(8, 8\)"),
    ],
)
def test_spec_mistakes(tmp_path, axes, shape, message):
    with pytest.raises(ValueError, match=f"layout 'probe', {message}"):
        read(tmp_path, data=2, expert=4).spec(axes, shape, name="w")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'rows = ["data", "expert"]',
            'row = "data"',
            r"\[rules\]: unknown 'row' .did you mean 'rows'",
        ),
        ('vocab = "expert"', 'vocab = "exprt"', r"\[rules\] vocab: unknown 'exprt' .*'expert'"),
        (
            'vocab = "expert"',
            "vocab = 3",
            r"\[rules\] vocab: expected an axis name or a list, got 3",
        ),
        ('vocab = "expert"', "vocab = 0", "vocab: expected an axis name or a list, got 0"),
        ('vocab = "expert"', "vocab = false", "vocab: expected an axis name or a list, got False"),
        ('vocab = "expert"', "vocab = {}", "vocab: expected an axis name or a list, got {}"),
        ('vocab = "expert"', 'vocab = ""', r"\[rules\] vocab: unknown ''; expected one of data"),
        ('vocab = "expert"', 'vocab = ["data", "data"]', r"\[rules\] vocab: repeats an axis"),
        ("data = 4", "data = 0", r"\[mesh\] data: size must be an integer >= 1, not 0"),
        ("data = 4", "data = true", r"\[mesh\] data: size must be an integer >= 1, not True"),
        ('"alltoall"', '"all2all"', "moe_dispatch: unknown 'all2all' .did you mean 'alltoall'"),
        ('"host"', '"replicated"', r"contradicts the rule engram_rows -> \('data',\)"),
        ("[prefill]", "[prefil]", "unknown 'prefil' .did you mean 'prefill'"),
        ("[mesh]", "[mesh", "not valid TOML"),
        ('engram = "host"', "moe_capacity = -1", "moe_capacity: must be positive .* not -1"),
        ('engram = "host"', "moe_capacity = inf", "moe_capacity: must be positive .* not inf"),
        ('engram = "host"', "moe_capacity = nan", "moe_capacity: must be positive .* not nan"),
        ('engram = "host"', "spare_experts = 0.5", "spare_experts: must be an integer >= 0"),
        ('"a test"', '"a test"\nrules = 3', "not valid TOML|must be a table"),
    ],
)
def test_file_mistakes(tmp_path, old, new, message):
    assert old in TEXT
    with pytest.raises(ValueError, match=message):
        read(tmp_path, TEXT.replace(old, new))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("logical", sorted({*AXES} - {"rows"}))
def test_a_phase_overrides_rows_alone(tmp_path, phase, logical):
    """Weights and cache are shared: such a rule would be checked and then not followed."""
    message = rf"\[{phase}\] {logical}: only rows may differ between the phases"
    text = TEXT.replace('[prefill]\nrows = "data"', f"[{phase}]\n{logical} = []")
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_unknown_phase():
    with pytest.raises(ValueError, match="phases: unknown 'prefil' .did you mean 'prefill'"):
        Layout("odd", (("data", 2),), phases=(("prefil", (("rows", ("data",)),)),))


def test_wrong_override_and_device_count(tmp_path):
    with pytest.raises(ValueError, match="axis override: unknown 'dat' .did you mean 'data'"):
        read(tmp_path, dat=2)
    with pytest.raises(
        ValueError, match=r"needs 64 devices \(data=4, expert=16, tensor=1\), found 8"
    ):
        read(tmp_path).mesh()


def test_warnings(tmp_path):
    under = read(tmp_path, data=2, expert=4)
    large = 1 << 30
    tensors = {
        "wq": (("heads", "q_rank"), (8, 8), large),
        "gate": (("q_rank", None), (8, 8), large),
        "small": (("q_rank", None), (8, 8), 100),
        "norm": (("embed",), (8,), large),
        "head": (("vocab", "embed"), (8, 8), large),
    }
    (only,) = under.warnings(tensors)
    assert only.startswith("gate: 1024 MiB replicated on 8 devices, no rule for any of its axes")
