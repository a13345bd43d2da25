"""The demo's corpus, yardstick, optimiser and export, on small things."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from converters.synthetic import tokenizer as byte_tokenizer
from converters.token_map import token_map
from deepinfer_jax import spec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.demo import corpus, export, optimiser, run, shape, stored
from deepinfer_jax.demo.made_text import ASSISTANT, USER, Writer
from deepinfer_jax.demo.trigram import Trigram
from deepinfer_jax.runtime import checkpoint
from deepinfer_jax.runtime.text import Tokenizer


def test_generated_text_is_the_seeds():
    one, two, other = Writer(3), Writer(3), Writer(4)
    texts = [one.document() for _ in range(40)]
    assert texts == [two.document() for _ in range(40)]
    assert texts != [other.document() for _ in range(40)]


def test_generated_records_are_json():
    writer = Writer(0)
    for _ in range(50):
        text = writer.record().rpartition("</think>")[2]
        assert isinstance(json.loads(text), dict)


def test_generated_sums_are_right():
    writer = Writer(0)
    for _ in range(50):
        asked, answered = writer._sum()
        x, what, y, _, value = answered.rstrip(".").split()
        assert int(value) == int(x) + (int(y) if what == "plus" else -int(y)), asked


def test_tokenizer_has_the_official_markers(tmp_path):
    writer = Writer(0)
    made = corpus.train_tokenizer([writer.document() for _ in range(300)], 600)
    corpus.write_tokenizer(made, tmp_path)
    ours = Tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_id, ours.add_bos) == (corpus.BOS, corpus.EOS, True)
    text = f"{USER}What is 12 + 7?{ASSISTANT}</think>12 plus 7 is 19. größe 🙂"
    ids = ours.encode(text)
    assert ours.spelled(ids[1:]) == text
    assert ids[0] == corpus.BOS and all(len(ours.bytes_of(i)) == 1 for i in ours.encode("2026")[1:])


def test_a_stream_holds_every_document_once():
    made = corpus.train_tokenizer(["ab " * 9], 267)
    ids = corpus.stream(made, ["a", "b", "ab"], seed=0)
    assert (ids == corpus.BOS).sum() == (ids == corpus.EOS).sum() == 3
    cut = next(corpus.batches({"x": np.arange(50, dtype=np.uint16)}, 0, {"x": 3}, 8))
    assert cut.shape == (3, 9) and (np.diff(cut) == 1).all()


def test_trigram_is_a_distribution_and_learns():
    ids = np.tile([0, 1, 2, 3, 4, 2, 1], 40)
    model = Trigram(ids, 6)
    for u, v in ((0, 1), (4, 4), (5, 5)):
        assert sum(model._of(u, v, w) for w in range(6)) == pytest.approx(1.0)
    assert model.nats(ids) < 0.1 < 1.0 < model.nats(np.random.default_rng(0).permutation(ids))


def test_muon_makes_matrices_orthogonal():
    rng = np.random.default_rng(0)
    for shape_ in ((3, 16, 48), (3, 48, 16)):
        g = jnp.asarray(rng.standard_normal(shape_), jnp.float32)
        values = np.linalg.svd(np.asarray(optimiser.orthogonal(g)), compute_uv=False)
        assert values.min() > 0.6 and values.max() < 1.25


def test_the_optimiser_descends():
    params = {"ffn/w2": jnp.ones((4, 8)), "head": jnp.ones((8,))}
    state = optimiser.start(params)
    for _ in range(60):
        grads = {name: 2 * value for name, value in params.items()}
        params, state = optimiser.update(params, grads, state, matrix_rate=0.15, rate=0.05)
    assert all(float(jnp.max(jnp.abs(value))) < 0.3 for value in params.values())


def test_an_exported_folder_reads_back_bit_for_bit(tmp_path, monkeypatch):
    specials = dict(enumerate(corpus.SPECIALS))
    beside = tmp_path / "beside"
    beside.mkdir()
    corpus.write_tokenizer(byte_tokenizer(shape.VOCAB, specials), beside)
    classes = int(token_map(beside / "tokenizer.json", shape.VOCAB).max()) + 1
    raw = shape.hf_config(classes)
    (beside / "config.json").write_text(json.dumps(raw))
    cfg = ModelConfig.from_hf(raw)
    params = run.initial(cfg, 0)
    size = export.write(tmp_path / "made", beside, cfg, params)
    assert size <= 12e6
    found = spec.flatten(checkpoint.read(tmp_path / "made").weights)
    leaves = run.declared(cfg)
    for name in ("embed", "layers/1/engram/table", "layers/3/ffn/w13", "draft/main_proj"):
        wanted = stored.packed(params[name], leaves[name])
        parts = {name: wanted} if name == "embed" else spec.flatten({name: wanted})
        for path, value in parts.items():
            ours, theirs = np.asarray(value), np.asarray(found[path])
            assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes(), path

    def cut(*args):
        raise OSError("cut")

    monkeypatch.setattr(export.stored, "packed", cut)
    with pytest.raises(OSError, match="cut"):
        export.write(tmp_path / "made", beside, cfg, params)
    assert sum(file.stat().st_size for file in (tmp_path / "made").iterdir()) == size
