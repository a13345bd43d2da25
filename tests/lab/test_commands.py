"""`deepinfer-jax layout show | compare | diff` on the small model, traced and compiled."""

import dataclasses
import io
import json

import jax
import pytest
from rich.console import Console

from deepinfer_jax import cli
from deepinfer_jax.lab import commands, simulate, views
from deepinfer_jax.lab.report import LayoutReport
from deepinfer_jax.layout import Layout
from deepinfer_jax.model import parallel
from deepinfer_jax.runtime import priced
from tests.lab import small_model
from tests.lab.test_report import read


def declared(under: Layout):
    return priced.parameters(small_model.config(), under)


def case(under: Layout) -> commands.Case:
    """A matrix product with a sum over all shards."""
    axes = tuple(axis for axis, _ in under.axes)

    def local(x, w):
        return jax.lax.psum(x @ w, axes)

    split, whole = jax.sharding.PartitionSpec(None, axes), jax.sharding.PartitionSpec(axes)
    function = parallel.spmd(under, local, (split, whole), jax.sharding.PartitionSpec())
    args = (
        jax.ShapeDtypeStruct((64, 256), "bfloat16"),
        jax.ShapeDtypeStruct((256, 4096), "bfloat16"),
    )
    return commands.Case(function, args, lambda path: "xw"[int(path)], tokens=64.0)


def printed() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=250, force_terminal=False), text


def test_show():
    console, text = printed()
    assert commands.show(read("tp_ep"), declared, console, depth=4) == 0
    shown = text.getvalue()
    assert "tp_ep  data=2 x tensor=4, moe_dispatch=gather" in shown
    assert "values  (expert, -, ffn, -) (('data', 'tensor'),) -> uint8[8, 2, 256, 64]" in shown
    assert "total on one device" in shown and "warning" not in shown
    quiet = Layout("bare", (("x", 8),))
    console, text = printed()
    commands.show(quiet, lambda _: {"w": declared(quiet)["layers/0/ffn/w13/values"]}, console)
    assert "warning" not in text.getvalue(), "small tensors may be replicated"


def test_show_folds_layers_that_are_placed_alike():
    """Of six times one layer, five; of the small model's four different layers, none."""
    console, text = printed()
    under = read("tp_ep")
    params = {
        path.replace("layers/0/", f"layers/{layer}/"): param
        for path, param in declared(under).items()
        if path.startswith("layers/0/")
        for layer in range(6)
    }
    params["layers/4/attn/wq_b/values"] = dataclasses.replace(
        params["layers/4/attn/wq_b/values"], axes=(None, None)
    )
    commands.show(under, lambda _: params, console, depth=5)
    shown = text.getvalue()
    assert "0, 1, 2, 3, 5 (each)" in shown and shown.count("wq_b") == 2
    console, text = printed()
    commands.show(under, declared, console, depth=4)
    assert "(each)" not in text.getvalue()


def test_show_refuses_what_either_phase_does_not_implement(tmp_path, capsys):
    """As `check` does before a weight is read."""
    model = tmp_path / "small.json"
    model.write_text(json.dumps(small_model.hf()))
    for text, message in (
        ('kv = ["a"]', "kv -> ('a',); the model keeps it whole"),
        ('slots = ["a"]\npages = ["a"]\nrows = ["a", "b"]', "rows -> ('a', 'b') in decode"),
    ):
        path = tmp_path / "odd.toml"
        path.write_text(f"[mesh]\na = 2\nb = 2\n[rules]\n{text}\n")
        assert cli.main(["layout", "show", str(path), "--model", str(model)]) != 0
        said = capsys.readouterr()
        assert message in said.err and "total on one device" not in said.out
    path.write_text(path.read_text() + '[decode]\nrows = ["a"]\n')
    assert cli.main(["layout", "show", str(path), "--model", str(model)]) == 0


def test_compare(tmp_path):
    console, text = printed()
    layouts = commands.read(["ep", "tp"], {"expert": 8, "tensor": 8})
    code = commands.compare(
        layouts, case, declared, "h200x8", console, json_to=tmp_path, png_to=tmp_path / "plot.png"
    )
    shown = text.getvalue()
    assert code == 0
    assert "ep" in shown and "yes" in shown and "network" in shown
    assert LayoutReport.from_json((tmp_path / "tp.json").read_text()).axes == {"tensor": 8}
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"'ep' has 8 devices \(expert=8\), --devices asks for 64"):
        commands.compare(layouts, case, declared, "h200x64", console)
    with pytest.raises(ValueError, match="--axis rows: no layout of ep, tp declares it"):
        commands.read(["ep", "tp"], {"rows": 2})
    with pytest.raises(FileNotFoundError, match="no shipped name 'epp'"):
        commands.read(["epp"])


def test_compare_reads_a_compiled_program(tmp_path):
    def compiled(under: Layout) -> simulate.Compiled:
        axes, mesh = tuple(axis for axis, _ in under.axes), under.mesh()
        args = tuple(
            jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec)
            )
            for leaf, spec in zip(
                case(under).args,
                (jax.sharding.PartitionSpec(None, axes), jax.sharding.PartitionSpec(axes)),
                strict=True,
            )
        )
        return simulate.compile_program(case(under).function, args, dict(under.axes))

    console, text = printed()
    layouts = commands.read(["ep"], {"expert": 8})
    options = {"json_to": tmp_path, "compiled": compiled}
    assert commands.compare(layouts, case, declared, "h200x8", console, **options) == 0
    assert "ep: compiled for 8 cpu devices in" in text.getvalue()
    found = LayoutReport.from_json((tmp_path / "ep.json").read_text())
    assert found.source == "compiled"
    assert found.sent == {"expert": {"all-reduce": 2 * 7 / 8 * 64 * 4096 * 2}}


@pytest.mark.slow
def test_compare_compiles_the_model(tmp_path, capsys):
    """In a process with as many simulated devices; what it sends is what the trace says."""
    (tmp_path / "small.json").write_text(json.dumps(small_model.hf()))
    arguments = [
        *("layout", "compare", "ep64_decode_host_engram", "--model", str(tmp_path / "small.json")),
        *("--devices", "h200x8", "--axis", "expert=8", "--batch", "16", "--context", "256"),
        *("--numerics", "float32", "--json-to", str(tmp_path)),
    ]
    found = []
    for more in ([], ["--compile", "cpu"]):
        assert cli.main([*arguments, *more]) == 0
        (file,) = tmp_path.glob("ep64*.json")
        found.append(LayoutReport.from_json(file.read_text()))
    assert "compiled for 8 cpu devices" in capsys.readouterr().out
    assert [one.source for one in found] == ["trace", "compiled"]
    assert found[0].bytes == found[1].bytes
    assert found[1].sent["expert"].keys() == {"all-to-all", "all-reduce"}, "for ragged exchanges"


def test_diff():
    console, text = printed()
    assert commands.diff(read("ep"), read("tp"), declared, console) == 0
    shown = text.getvalue()
    assert "rule expert" in shown and "layers/*/ffn/w13/values" in shown
    assert "moe_dispatch" in shown and shown.count("layers/*/attn/wq_b/values") == 1


def test_diff_names_the_rules_of_a_phase():
    rules = tuple((logical, ("x",)) for logical in ("rows", "slots", "pages"))
    plain = Layout("plain", (("x", 2), ("y", 2)), rules)
    under = dataclasses.replace(plain, name="other", phases=(("prefill", (("rows", ("x", "y")),)),))
    console, text = printed()
    commands.diff(plain, under, declared, console)
    rows = [line.split("│")[1:-1] for line in text.getvalue().splitlines() if "rule" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["rule rows of prefill", "['x']", "['x', 'y']"]
    ]


def test_plot_shows_every_resource(monkeypatch, tmp_path):
    axes = pytest.importorskip("matplotlib.axes")
    ms = {"compute": 1.0, "memory": 2.0, "network x": 1.0, "network y": 2.0, "host": 9.0}
    one = LayoutReport("one", "h200", 1, {}, {}, 0, 1, 0, {}, {}, 0.0, [], {}, ms)
    drawn = {}
    bar = axes.Axes.bar

    def kept(self, x, height, *args, **options):
        drawn[options["label"]] = list(height)
        return bar(self, x, height, *args, **options)

    monkeypatch.setattr(axes.Axes, "bar", kept)
    views.plot([one], tmp_path / "plot.png")
    del drawn["activations"]
    assert drawn == {"compute": [1.0], "memory": [2.0], "network": [3.0], "host": [9.0]}


def test_sizes_for_people():
    assert [views.size(n) for n in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "5 MiB",
        "3.07e+03 GiB",
    ]
