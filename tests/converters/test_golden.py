"""The golden checkpoint (see PROVENANCE.md): its files come back, its token map is ours."""

import filecmp
import json
from pathlib import Path

import jax
import numpy as np

from converters import from_hf, to_hf
from converters import safetensors_io as st
from converters.converted import open_converted
from deepinfer_jax.runtime import checkpoint as checkpoints
from deepinfer_jax.runtime.model import load

GOLDEN = Path(__file__).parents[1] / "golden"


def test_golden_round_trip_and_weights(tmp_path):
    """Files equal byte for byte; official and converted folder load to the same bits."""
    source = GOLDEN / "v41-tiny"
    out = from_hf.convert(source, tmp_path / "out", quiet=True)
    back = to_hf.convert(out, tmp_path / "back", quiet=True)
    names = sorted(file.name for file in source.iterdir())
    assert filecmp.cmpfiles(source, back, names, shallow=False) == (names, [], [])
    assert sorted(file.name for file in back.iterdir()) == names
    one, two = load(source), load(out)
    assert one.setup == two.setup
    for a, b in zip(jax.tree.leaves(one.weights), jax.tree.leaves(two.weights), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_golden_token_map(tmp_path):
    header = st.read_header(GOLDEN / "v41_tiny.safetensors")
    with st.Reader() as reader:
        wanted = reader.read(header.tensors["engram.token_map"])
    found = checkpoints.read(GOLDEN / "v41-tiny").token_map
    assert np.array_equal(found, wanted) and found.dtype == np.int32
    out = from_hf.convert(GOLDEN / "v41-tiny", tmp_path / "out", quiet=True)
    assert np.array_equal(open_converted(out).token_map(), wanted)


def test_released_token_map_samples():
    """The numbers the golden file keeps of the released map (test_token_map computes the map)."""
    kept = json.loads((GOLDEN / "v41_release_engram.json").read_text())
    digest = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    assert kept["token_map_sha256_int32_le"] == digest
    assert kept["compressed_vocab"] == 99_092
