"""The demo's text, its tokenizer, and token streams to train and validate on.

Two kinds of text, both free: the King James Bible (public domain; printed by Debian's `bible`
program from the package bible-kjv-text, one chapter a document, verse labels removed) and documents
that `made_text` generates. Every 40th chapter and a second seed of the generator are held out.

The tokenizer is byte-level BPE in DeepSeek's format: the official special tokens first (BOS 0, EOS
1, pad 2), digits one by one, byte-level decoder. A stream is documents in random order, each
between BOS and EOS; sequences are cut from it at random places.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from deepinfer_jax.demo.made_text import Writer

SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<｜System｜>",  # also the drafter's noise token, as in the release
    "｜DSML｜",
    "<｜image｜>",
)
BOS, EOS, PAD, SYSTEM, IMAGE = 0, 1, 2, 7, 9
HELD_OUT = 40  # one chapter of so many
MADE = 22000  # generated documents
MADE_HELD_OUT = 400
DEBIAN = ("bible-kjv", "bible-kjv-text")
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Documents(NamedTuple):
    """Texts to train on and texts held out, by kind ("bible", "made")."""

    train: dict[str, list[str]]
    held_out: dict[str, list[str]]


def bible(file: Path | None = None) -> list[str]:
    """The chapters of the King James Bible, verses one a line.

    file: what `bible -f gen1:1-rev22:21` printed; None fetches the Debian packages with apt-get and
    runs the program from a temporary folder.
    """
    printed = file.read_text(encoding="utf-8") if file is not None else _print_bible()
    chapters: dict[str, list[str]] = {}
    for line in printed.splitlines():
        found = re.match(r"(\w+?\d+):\d+ (.*)", line)
        if found:
            chapters.setdefault(found[1], []).append(found[2].strip())
    if len(chapters) != 1189:
        raise ValueError(f"King James Bible: {len(chapters)} chapters; expected 1189")
    return ["\n".join(verses) for verses in chapters.values()]


def _print_bible() -> str:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-q", *DEBIAN], cwd=folder, check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package.name, "root"], cwd=folder, check=True)
        root = Path(folder) / "root" / "usr"
        command = [str(root / "bin" / "bible"), "-p", str(root / "lib"), "-f", "gen1:1-rev22:21"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout


def documents(kjv: Path | None = None, seed: int = 0) -> Documents:
    """All documents, split."""
    chapters = bible(kjv)
    train, held = Writer(seed), Writer(seed + 1)
    return Documents(
        {
            "bible": [text for i, text in enumerate(chapters) if i % HELD_OUT != HELD_OUT // 2],
            "made": [train.document() for _ in range(MADE)],
        },
        {
            "bible": chapters[HELD_OUT // 2 :: HELD_OUT],
            "made": [held.document() for _ in range(MADE_HELD_OUT)],
        },
    )


def train_tokenizer(texts: Iterable[str], vocab: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab` ids, special tokens first."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    if made.get_vocab_size() != vocab:
        raise ValueError(f"tokenizer: {made.get_vocab_size()} ids; expected {vocab}")
    return made


def write_tokenizer(made: tokenizers.Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    made.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[PAD],
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def stream(made: tokenizers.Tokenizer, texts: list[str], seed: int) -> np.ndarray:
    """uint16 ids of all documents in random order, each between BOS and EOS."""
    order = np.random.default_rng(seed).permutation(len(texts))
    encoded = made.encode_batch([texts[i] for i in order], add_special_tokens=False)
    ids = [np.array([BOS, *one.ids, EOS], np.uint16) for one in encoded]
    return np.concatenate(ids)


def batches(
    streams: Mapping[str, np.ndarray], seed: int, batch: Mapping[str, int], length: int
) -> Iterator[np.ndarray]:
    """int32 [batch, length + 1] cut at random places, so many of each kind, without end."""
    rng = np.random.default_rng(seed)
    while True:
        cut = [
            streams[kind][start : start + length + 1]
            for kind, count in batch.items()
            for start in rng.integers(0, len(streams[kind]) - length - 1, count)
        ]
        yield np.stack(cut).astype(np.int32)


def windows(ids: np.ndarray, length: int) -> np.ndarray:
    """int32 [n, length]: the stream cut one after another, the rest left out."""
    count = len(ids) // length
    return ids[: count * length].reshape(count, length).astype(np.int32)
