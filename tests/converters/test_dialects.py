"""Other spellings of the same model: converted to the same bits, or refused by their name."""

import filecmp
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

from converters import check, dialects, from_hf, to_hf
from converters import safetensors_io as st
from converters.recipes import Exponents
from converters.source import CheckpointError, LossWarning
from deepinfer_jax import spec
from deepinfer_jax.runtime import checkpoint as checkpoints

# Official -> transformers' deepseek_v4 spelling, in order.
TO_TRANSFORMERS = (
    (r"^embed\.", "embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2"),
    (r"\.attn\.attn_sink$", ".self_attn.sinks"),
    (r"\.attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.compressor\.norm\.", ".self_attn.compressor.kv_norm."),
    (r"\.attn\.compressor\.wgate\.", ".self_attn.compressor.gate_proj."),
    (r"\.attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"(\.self_attn\.(?:compressor\.)?)wkv\.", r"\1kv_proj."),
    (r"\.wk\.", ".k_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.ffn\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.ffn\.", ".mlp."),
    (r"(experts(?:\.\d+)?)\.w1\.", r"\1.gate_proj."),
    (r"(experts(?:\.\d+)?)\.w2\.", r"\1.down_proj."),
    (r"(experts(?:\.\d+)?)\.w3\.", r"\1.up_proj."),
    (r"\.scale$", ".weight_scale_inv"),
)


def transformers_name(name: str) -> str:
    if name.startswith("vision."):
        return name
    for pattern, replacement in TO_TRANSFORMERS:
        name = re.sub(pattern, replacement, name)
    return name


@pytest.fixture
def other(checkpoint, tmp_path):
    """A copy to rewrite in another dialect."""
    return shutil.copytree(checkpoint, tmp_path / "other")


def tree(path) -> dict:
    leaves = spec.flatten(checkpoints.read(path).weights)
    return {name: (str(leaf.dtype), np.asarray(leaf).tobytes()) for name, leaf in leaves.items()}


@pytest.fixture(scope="module")
def native(converted) -> dict:
    """The tree of the released spelling."""
    return tree(converted)


@pytest.fixture(scope="module")
def widened(checkpoint, tmp_path_factory):
    """The bf16 target of the released spelling."""
    target = tmp_path_factory.mktemp("bf16") / "out"
    return from_hf.convert(checkpoint, target, target="bf16", quiet=True)


def same_tree(one: dict, two: dict) -> bool:
    assert one.keys() == two.keys()
    return all(one[name] == two[name] for name in one)


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_transformers_names(prefix, other, native, tmp_path, rewrite):
    """The same bits in the tree, from either folder, and the dialect's own files back."""
    rewrite(other, lambda name, tensor: {prefix + transformers_name(name): tensor})
    names = check.examine(other).source.tensors
    assert f"{prefix}layers.0.self_attn.q_a_proj.weight_scale_inv" in names
    assert same_tree(tree(other), native)
    if prefix != "model.":
        return
    out = from_hf.convert(other, tmp_path / "out", quiet=True)
    assert same_tree(tree(out), native)
    back = to_hf.convert(out, tmp_path / "back", quiet=True)
    for file in other.iterdir():
        assert filecmp.cmp(file, back / file.name, shallow=False), file.name


def test_official_names_are_their_own_spelling(checkpoint):
    for name in check.examine(checkpoint).table.by_name:
        assert dialects.rename(name) == name
        assert dialects.rename(transformers_name(name)) == name


def test_stacked_experts(other, native, tmp_path, rewrite):
    """gate_up_proj [experts, 2 I, D] and down_proj, their scales likewise, one tensor a layer."""
    checked = check.examine(other)
    cfg = checked.cfg
    with st.Reader() as reader:
        data = {
            name: reader.read(tensor).view(np.uint8)
            for name, tensor in checked.source.tensors.items()
            if ".experts." in name
        }

    def change(name, tensor):
        match = re.match(r"((\w+)\.\d+\.ffn\.experts)\.(\d+)\.(w\d)\.(weight|scale)$", name)
        if match is None:
            return {name: tensor}
        stem, kind, expert, projection, part = match.groups()
        if expert != "0" or projection == "w3":
            return {}
        count = cfg.n_routed_experts if kind == "layers" else cfg.dspark_n_routed_experts
        kinds = ("w1", "w3") if projection == "w1" else ("w2",)
        whole = np.stack(
            [np.concatenate([data[f"{stem}.{e}.{k}.{part}"] for k in kinds]) for e in range(count)]
        )
        called = {"w1": "gate_up_proj", "w2": "down_proj"}[projection]
        called += "_scale_inv" if part == "scale" else ""
        name = f"{stem}.{called}".replace(".ffn.", ".mlp.")
        return {name: {**tensor, "shape": whole.shape, "data": whole.reshape(-1)}}

    rewrite(other, change)
    assert len(check.examine(other).source.tensors) < len(checked.source.tensors) / 1.2
    out = from_hf.convert(other, tmp_path / "out", quiet=True)
    assert same_tree(tree(out), native)
    back = to_hf.convert(out, tmp_path / "back", quiet=True)
    for file in other.glob("*.safetensors"):
        assert filecmp.cmp(file, back / file.name, shallow=False), file.name


def scales_as(dtype: str):
    kind = {"U8": np.uint8, "F32": np.float32, "BF16": ml_dtypes.bfloat16}[dtype]

    def change(name, tensor):
        if tensor["dtype"] != "F8_E8M0":
            return {name: tensor}
        scale = tensor["data"].view(ml_dtypes.float8_e8m0fnu)
        data = tensor["data"] if dtype == "U8" else scale.astype(np.float32).astype(kind)
        return {name: {**tensor, "dtype": dtype, "data": data.view(np.uint8)}}

    return change


@pytest.mark.parametrize("dtype", ["U8", "F32", "BF16"])
def test_scales_in_other_dtypes(dtype, other, native, rewrite):
    """Raw exponent bytes are bytes, floats are powers of two: the same dequantised weights."""
    rewrite(other, scales_as(dtype))
    assert same_tree(tree(other), native)


def test_scale_exponents_at_the_ends(tmp_path):
    """2^-127 (subnormal in float32) to 2^127; nothing else passes."""
    values = np.array([2.0**-127, 2.0**-126, 1, 128, 2.0**127], np.float32)
    file = tmp_path / "x"
    for bad in (0.0, -1.0, 3.0, 0.006975, np.inf, np.nan, 2.0**-128):
        data = np.append(values, np.float32(bad))
        st.write(file, st.header_bytes([("s", "F32", data.shape)]), [data.view(np.uint8)])
        stored = dialects.canonical(st.read_header(file).tensors)[0]["s"]
        out = np.empty(5, ml_dtypes.float8_e8m0fnu)
        with st.Reader() as reader:
            Exponents(stored).fill(reader, 0, 5, out)
            assert out.view(np.uint8).tolist() == [0, 1, 127, 134, 254]
            with pytest.raises(CheckpointError, match="s: scale .* is not a power of two"):
                Exponents(stored).fill(reader, 5, 6, out[:1])


def test_a_scale_that_is_no_power_of_two_stops_the_conversion(other, tmp_path, rewrite, capsys):
    change = scales_as("F32")

    def spoil(name, tensor):
        changed = change(name, tensor)
        if name == "layers.1.attn.wo_a.scale":
            changed[name]["data"][:4] = np.frombuffer(np.float32(0.006975).tobytes(), np.uint8)
        return changed

    rewrite(other, spoil)
    assert from_hf.main([str(other), str(tmp_path / "out"), "--quiet"]) == 2
    assert "layers.1.attn.wo_a.scale: scale" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def dequantised(checked, name: str) -> np.ndarray:
    """The bfloat16 values of a quantised tensor, by loops over codes: not the code under test."""
    with st.Reader() as reader:
        tensors = checked.source.tensors
        weight = reader.read(tensors[name])
        scale = reader.read(tensors[name.removesuffix("weight") + "scale"]).astype(np.float64)
    if weight.dtype == np.int8:
        grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        table = np.array(grid + [-x for x in grid])
        codes = weight.view(np.uint8)
        values = np.zeros((codes.shape[0], codes.shape[1] * 2))
        values[:, 0::2], values[:, 1::2] = table[codes % 16], table[codes // 16]
        tall, wide = 1, 32
    else:
        values, (tall, wide) = weight.astype(np.float64), (32, 32)
    for i, j in np.ndindex(scale.shape):
        values[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide] *= scale[i, j]
    return values.astype(np.float32).astype(ml_dtypes.bfloat16)


def is_dense(name: str, dtype: str) -> bool:
    return dtype in ("F8_E4M3", "I8") and not name.endswith("engram.embed.weight")


def test_bf16_target_is_exact(checkpoint, widened, tmp_path):
    checked = check.examine(checkpoint)
    loaded = checkpoints.read(widened)
    assert (loaded.cfg.dense_dtype, loaded.cfg.expert_dtype) == ("bf16", "bf16")
    leaves = spec.flatten(loaded.weights)
    for name, where in (
        ("layers.0.attn.wq_b.weight", ("layers/0/attn/wq_b", ())),
        ("layers.2.ffn.experts.1.w3.weight", ("layers/2/ffn/w13", (1, 1))),
        ("mtp.1.ffn.experts.0.w2.weight", ("draft/stages/1/ffn/w2", (0,))),
        ("mtp.0.main_proj.weight", ("draft/main_proj", ())),
    ):
        leaf = np.asarray(leaves[where[0]])[where[1]]
        assert leaf.tobytes() == dequantised(checked, name).tobytes(), name
    assert str(leaves["layers/1/engram/table/values"].dtype) == "float8_e4m3fn"
    back = to_hf.convert(widened, tmp_path / "back", quiet=True)
    assert same_tree(tree(back), tree(widened))


@pytest.mark.parametrize("left", ["attn.wq_b", "ffn.experts", "nothing"])
def test_bf16_copies_with_some_fp8_left(left, other, checkpoint, widened, rewrite):
    """What is still quantised is dequantised too, so that a kind of matrix has one dtype."""
    checked = check.examine(checkpoint)

    def change(name, tensor):
        weight = name.removesuffix("scale") + "weight" if name.endswith(".scale") else name
        if left in name or not is_dense(weight, checked.source.tensors[weight].dtype):
            return {name: tensor}
        if name.endswith(".scale"):
            return {}
        data = dequantised(checked, name)
        return {name: {"dtype": "BF16", "shape": data.shape, "data": data.view(np.uint8)}}

    rewrite(other, change)
    cfg, got, want = check.examine(other).cfg, tree(other), tree(widened)
    assert (cfg.dense_dtype, cfg.expert_dtype) == (
        "bf16",
        "fp4" if left == "ffn.experts" else "bf16",
    )
    experts = {name for name in got if "/w13" in name or "/w2" in name}
    assert same_tree(
        {name: leaf for name, leaf in got.items() if name not in experts},
        {name: leaf for name, leaf in want.items() if "/w13" not in name and "/w2" not in name},
    )
    if cfg.expert_dtype == "bf16":
        assert same_tree(got, want)


def test_fp8_without_a_scale(other, rewrite):
    rewrite(other, lambda name, t: {} if name.endswith("attn.wkv.scale") else {name: t})
    with pytest.raises(CheckpointError, match=r"missing: layers\.\{0-4\}\.attn\.wkv\.scale"):
        check.examine(other)


def test_experts_repacked_as_fp8(other, rewrite, tmp_path):
    """e4m3 experts with block scales, and an expert_dtype that is gone or stale."""

    def change(name, tensor):
        if ".experts." not in name or ".shared_experts." in name:
            return {name: tensor}
        rows, columns = tensor["shape"]
        columns *= 32 if name.endswith("scale") else 2
        if name.endswith("scale"):
            shape = (-(-rows // 32), -(-columns // 32))
            return {name: {**tensor, "shape": shape, "data": np.full(shape, 120, np.uint8)}}
        data = np.arange(rows * columns, dtype=np.uint32).astype(np.uint8) % 120
        return {name: {"dtype": "F8_E4M3", "shape": (rows, columns), "data": data}}

    rewrite(other, change)
    loaded = checkpoints.read(from_hf.convert(other, tmp_path / "out", quiet=True))
    assert loaded.cfg.expert_dtype == "fp8"
    assert loaded.weights.layers[0].ffn.w13.values.dtype == ml_dtypes.float8_e4m3fn
    assert loaded.weights.layers[0].ffn.w13.block == (32, 32)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_draft_heads_of_any_width(dtype, other, native, rewrite):
    """Heads stored wider than the release's bfloat16 load; values bfloat16 has are unchanged."""
    kind = {"F32": np.float32, "F16": np.float16}[dtype]
    heads = ("markov_head.embed.weight", "markov_head.head.weight", "confidence_head.proj.weight")

    def change(name, tensor):
        if not name.endswith(heads):
            return {name: tensor}
        data = tensor["data"].view(ml_dtypes.bfloat16).astype(np.float32).astype(kind)
        return {name: {**tensor, "dtype": dtype, "data": data.view(np.uint8)}}

    rewrite(other, change)
    got = tree(other)
    if dtype == "F32":
        assert same_tree(got, native)
    else:
        assert got["draft/confidence"] == native["draft/confidence"]


def test_rounding_is_announced(other, rewrite, tmp_path, capsys):
    """F32 where the release has bfloat16 loses bits: said when checked and when converted."""

    def change(name, tensor):
        if not name.endswith("attn_norm.weight"):
            return {name: tensor}
        data = tensor["data"].view(ml_dtypes.bfloat16).astype(np.float32)
        return {name: {**tensor, "dtype": "F32", "data": data.view(np.uint8)}}

    rewrite(other, change)
    said = (
        r"tensor\(s\) stored as F32 or F16 are rounded to bfloat16.*layers.{0-4}.attn_norm.weight"
    )
    with pytest.warns(LossWarning, match=said):
        from_hf.convert(other, tmp_path / "out", quiet=True)
    assert from_hf.main([str(other), str(tmp_path / "again"), "--quiet"]) == 0
    assert check.main([str(other)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(re.match(f"warning: .*{said}", line) for line in lines)


def test_exact_conversions_announce_nothing(other, rewrite, capsys):
    rewrite(other, scales_as("F32"))
    assert check.main([str(other)]) == 0
    assert capsys.readouterr().err == ""


FOREIGN = {
    "MLX": ({"layers.0.attn.wq_a.scales": "F32", "layers.0.attn.wq_a.biases": "F32"}, "MLX"),
    "GPTQ": ({"layers.0.attn.wq_a.qweight": "I32"}, "AutoRound or GPTQ"),
    "compressed": ({"layers.0.attn.wq_a.weight_packed": "I32"}, "compressed-tensors"),
    "EXL3": ({"layers.0.attn.wq_a.trellis": "I16"}, "EXL3"),
    "NVFP4": ({"layers.0.ffn.experts.0.w1.weight_scale_2": "F32"}, "NVFP4"),
    "V4": ({"layers.0.ffn.gate.tid2eid": "I64"}, "DeepSeek-V4 tensors"),
    "old MTP": ({"mtp.0.e_proj.weight": "BF16"}, "next-token module of V3 and V4"),
    "Quark": ({"layers.0.ffn.shared_experts.w1.weight": "U8"}, "Quark MXFP4"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_formats_are_refused_by_name(case, other, rewrite, tmp_path, capsys):
    tensors, said = FOREIGN[case]
    data = np.zeros(64, np.uint8)
    more = {
        n: {"dtype": d, "shape": (64 * 8 // st.DTYPES[d][0],), "data": data}
        for n, d in tensors.items()
    }
    rewrite(
        other, lambda n, t: ({} if n in more else {n: t}) | (more if n == "norm.weight" else {})
    )
    assert from_hf.main([str(other), str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]
    assert not list(tmp_path.glob("out*"))


def test_a_drafter_alone_is_named(other, rewrite):
    rewrite(other, lambda name, tensor: {name: tensor} if name.startswith("mtp.") else {})
    with pytest.raises(CheckpointError, match="only a drafter"):
        check.examine(other)


def test_two_spellings_of_one_tensor_clash(other, rewrite):
    def change(name, tensor):
        return {name: tensor} | ({"model.norm.weight": tensor} if name == "norm.weight" else {})

    rewrite(other, change)
    with pytest.raises(CheckpointError, match="norm.weight and model.norm.weight are both"):
        check.examine(other)
