"""There and back: every tensor accounted for exactly once, every byte the same."""

import filecmp
import hashlib
import io
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from converters import check, from_hf, synthetic, to_hf
from converters import safetensors_io as st
from converters.converted import open_converted
from converters.grid import grid
from converters.progress import Progress
from converters.shards import crc32c
from converters.source import CheckpointError
from deepinfer_jax import spec
from deepinfer_jax.runtime import checkpoint as checkpoints


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_files_come_back_byte_for_byte(checkpoint, converted, tmp_path):
    back = to_hf.convert(converted, tmp_path / "back", quiet=True)
    names = sorted(file.name for file in checkpoint.iterdir())
    assert names == sorted(file.name for file in back.iterdir())
    assert filecmp.cmpfiles(checkpoint, back, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("seed", [1, 4, 6])
def test_other_shapes_come_back(seed, tmp_path):
    """Awkward sizes, tiny memory budget, one file without an index."""
    source = synthetic.write(tmp_path / "a", synthetic.draw_config(seed), seed=seed, shards=1)
    (source / "model.safetensors.index.json").unlink()
    out = from_hf.convert(source, tmp_path / "b", memory=2**14, workers=1, quiet=True)
    back = to_hf.convert(out, tmp_path / "c", memory=2**20, quiet=True)
    (file,) = source.glob("*.safetensors")
    assert filecmp.cmp(file, back / file.name, shallow=False)


def test_manifest_accounts_for_every_tensor_once(checkpoint, converted):
    manifest = json.loads((converted / "manifest.json").read_text())
    tensors = check.examine(checkpoint).source.tensors
    assert manifest["tensors"].keys() == tensors.keys()
    with st.Reader() as reader:
        for name, tensor in tensors.items():
            data = np.empty(tensor.nbytes, np.uint8)
            reader.read_into(tensor, memoryview(data))
            assert manifest["tensors"][name] == hashlib.sha256(data).hexdigest()
    assert manifest["source"]["tensors"] == len(tensors) == 450
    assert not (converted / "journal.jsonl").exists() and not (converted / "lock").exists()


def test_source_is_left_alone(checkpoint, tmp_path):
    before = {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in checkpoint.iterdir()}
    for file in checkpoint.iterdir():
        file.chmod(0o444)
    checkpoint.chmod(0o555)
    try:
        from_hf.convert(checkpoint, tmp_path / "out", quiet=True)
    finally:
        checkpoint.chmod(0o755)
    assert before == {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in checkpoint.iterdir()}


def test_a_hub_cache_of_links_works(checkpoint, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / ("a" * 40)
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        (blobs / f"{number}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert check.examine(snapshot).source.identity()["revision"] == "a" * 40
    out = from_hf.convert(snapshot, tmp_path / "out", quiet=True)
    assert json.loads((out / "manifest.json").read_text())["source"]["revision"] == "a" * 40


def test_official_and_converted_folder_read_the_same(checkpoint, converted):
    one, two = checkpoints.read(checkpoint), checkpoints.read(converted)
    assert one.cfg == two.cfg and same_bits(one.token_map, two.token_map)
    assert (one.tokenizer.read_bytes(), two.tokenizer.name) == (
        two.tokenizer.read_bytes(),
        "tokenizer.json",
    )
    left, right = spec.flatten(one.weights), spec.flatten(two.weights)
    assert left.keys() == right.keys() == spec.flatten(two.weights).keys()
    assert all(same_bits(left[name], right[name]) for name in left)
    experts = one.weights.layers[0].ffn.w13
    table = check.examine(checkpoint)
    with st.Reader() as reader:
        for name, at in (("w1", 0), ("w3", 1)):
            stored = table.source.tensors[f"layers.0.ffn.experts.2.{name}.weight"]
            assert same_bits(experts.values[2, at], reader.read(stored).view(np.uint8))


def test_orbax_reads_the_folder(converted):
    """The weights are an orbax checkpoint: its own API restores them, sharded as asked."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(converted / "weights").item_metadata.tree
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), tree
        )
        target["embed"] = jax.ShapeDtypeStruct(
            tree["embed"].shape, tree["embed"].dtype, sharding=columns
        )
        restored = checkpointer.restore(converted / "weights", target)
    assert restored["embed"].sharding == columns
    weights = checkpoints.read(converted).weights
    assert same_bits(restored["embed"], weights.embed)
    scales = restored["layers"][1]["ffn"]["w13"]["scales"]
    assert same_bits(scales, weights.layers[1].ffn.w13.scales)


def test_text_only_and_slices(checkpoint, tmp_path):
    text = from_hf.convert(checkpoint, tmp_path / "text", text_only=True, quiet=True)
    loaded = checkpoints.read(text)
    assert loaded.cfg.vision is None and loaded.weights.vision is None
    back = to_hf.convert(text, tmp_path / "back", quiet=True)
    full = check.examine(checkpoint).source.tensors
    found = check.examine(back).source.tensors
    vision = {n for n in full if n.startswith(("vision.", "aligner.", "image_"))}
    assert len(vision) == 26 and found.keys() == full.keys() - vision

    only = ("layers/1", "embed")
    piece = from_hf.convert(checkpoint, tmp_path / "slice", only=only, quiet=True)
    with pytest.raises(CheckpointError, match="a slice of embed, layers/1, not a model"):
        checkpoints.read(piece)
    weights = checkpoints.read(piece, partial=True).weights
    assert weights.head is None and weights.layers[0].attn_norm is None
    assert weights.layers[1].attn_norm is not None and weights.embed is not None
    with pytest.raises(CheckpointError, match="--only layers/99"):
        from_hf.convert(checkpoint, tmp_path / "none", only=["layers/99"], quiet=True)


def test_damaged_folders_are_refused(checkpoint, tmp_path, capsys):
    out = from_hf.convert(checkpoint, tmp_path / "out", quiet=True)
    leaf = out / "weights" / "layers.0.attn.wkv.values"
    (shard,) = [file for file in (leaf / "c").rglob("*") if file.is_file()]
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    assert check.main([str(out)]) == 0
    assert check.main([str(out), "--deep"]) == 2
    assert "layers.0.attn.wkv.weight: its bytes are not those" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="layers.0.attn.wkv.weight: its bytes are not those"):
        to_hf.convert(out, tmp_path / "back", quiet=True)
    shard.write_bytes(data[:-9])
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.values"):
        checkpoints.read(out)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.values"):
        checkpoints.read(out)
    leaf.rename(leaf.with_name("layers.0.attn.other"))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.read(out)
    assert sorted(line.rpartition(": ")[2] for line in caught.value.problems) == [
        "declared leaf missing",
        "not a declared leaf",
    ]


def test_manifest_and_token_map_must_fit(converted, tmp_path, edit):
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    np.save(out / "token_map.npy", np.zeros(3, np.int32))
    with pytest.raises(CheckpointError, match=r"token_map.npy: int32\[3\]; expected int32\["):
        checkpoints.read(out)
    edit(out / "manifest.json", lambda manifest: manifest["tensors"].pop("norm.weight"))
    with pytest.raises(CheckpointError, match="does not list 1 tensor.*norm.weight"):
        checkpoints.read(out)
    edit(out / "manifest.json", lambda manifest: manifest.update(format_version=99))
    with pytest.raises(CheckpointError, match="format_version 99, this version reads 1"):
        checkpoints.read(out)


def test_crc32c():
    """The check value of the polynomial's catalogue entry."""
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize(
    ("shape", "axes", "stack"),
    [
        ((384, 2, 2304, 2560), ("expert", None, "ffn", None), 2),
        ((384, 5120, 72), ("expert", None, "ffn"), 1),
        ((384_006_168, 256), ("engram_rows", None), 0),
        ((129_280, 5120), ("vocab", "embed"), 0),
        ((25_600, 6144), ("embed", None), 0),
        ((7,), ("heads",), 0),
        ((1, 5376), (None, None), 0),
    ],
)
def test_grids(shape, axes, stack):
    """Shards tile a leaf in whole rows within their size; chunks divide them, one expert each."""
    cut = grid(spec.Param(shape, "uint8", axes), stack, 2**26)
    assert all(s % c == 0 for s, c in zip(cut.shard, cut.chunk, strict=True))
    assert cut.chunk[:stack] == (1,) * stack
    assert all(s >= n for s, n in zip(cut.shard[stack + 1 :], shape[stack + 1 :], strict=True))
    assert np.prod([min(s, n) for s, n in zip(cut.shard, shape, strict=True)]) <= 2**26
    assert np.prod(cut.chunk) <= 2**20
    for axis in range(stack, len(shape)):
        if axes[axis] and shape[axis] % 8 == 0 and np.prod(shape[stack:]) > 2**19:
            assert shape[axis] // 8 % cut.chunk[axis] == 0 or shape[axis] > 10**8


def test_output_places_that_are_refused(checkpoint, tmp_path):
    for target in (checkpoint, checkpoint / "inside", checkpoint.parent):
        with pytest.raises(CheckpointError, match="may not overlap the source"):
            from_hf.convert(checkpoint, target, quiet=True)
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    with pytest.raises(CheckpointError, match="may not overlap the source"):
        from_hf.convert(checkpoint, link / "inside", quiet=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(CheckpointError, match="already exists"):
        from_hf.convert(checkpoint, tmp_path / "there", quiet=True)
    with pytest.raises(CheckpointError, match="no such folder for the output"):
        from_hf.convert(checkpoint, tmp_path / "no" / "where", quiet=True)
    (tmp_path / "empty").mkdir()
    assert from_hf.convert(checkpoint, tmp_path / "empty", quiet=True).is_dir()


def test_progress_is_plain_lines_off_a_terminal():
    stream = io.StringIO()
    with Progress("convert", 4_000_000, 1_000_000, stream) as progress:
        progress.advance(3_000_000, "layers/0")
    lines = stream.getvalue().splitlines()
    assert "1.0 of 4.0 MB" in lines[0] and "resuming" in lines[0]
    assert "4.0 of 4.0 MB" in lines[-1] and "MB/s" in lines[-1] and "finished" in lines[-1]


def test_scales_survive_restoring_as_numpy(converted):
    """No device, no sharding: one region of one leaf, as numpy."""
    opened = open_converted(converted)
    scales = opened.read("layers/0/attn/wkv/scales", (slice(0, 1), slice(0, 2)))
    assert scales.dtype == ml_dtypes.float8_e8m0fnu and scales.shape == (1, 2)
