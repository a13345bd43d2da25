"""Small random checkpoints of awkward shapes, and the transcription's values for one sequence.

`CASES` names a seed of `converters.synthetic.draw_config` and what is changed in the drawn config.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from converters import synthetic
from converters.token_map import token_map
from tests.oracle.drafter import Draft, draft
from tests.oracle.model import Model, Run
from tests.oracle.rules import Rules


def _no_pool(config: dict[str, Any]) -> None:
    config["text_config"]["candidate_source_layer_id"] = None


def _no_engram(config: dict[str, Any]) -> None:
    config["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}


def _no_drafter(config: dict[str, Any]) -> None:
    text = config["text_config"]
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    text |= {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": []}


def _every_entry(config: dict[str, Any]) -> None:
    config["text_config"]["index_topk"] = 300


def _encoder_only(config: dict[str, Any]) -> None:
    """No layer of ratio 1: the decoder half is empty."""
    text = config["text_config"]
    text["compress_ratios"] = [2 if ratio == 1 else ratio for ratio in text["compress_ratios"]]
    _no_pool(config)


def _window_only(config: dict[str, Any]) -> None:
    text = config["text_config"]
    text["compress_ratios"] = [0] * len(text["compress_ratios"])
    text |= {"kv_source_layer_ids": [], "index_source_layer_ids": []}
    _no_pool(config)


def _fp8_experts(config: dict[str, Any]) -> None:
    config["quantization_config"]["expert_dtype"] = "fp8"


def _unquantised(config: dict[str, Any]) -> None:
    del config["quantization_config"]


CASES: dict[str, tuple[int, Callable[[dict], None] | None]] = {
    "2": (2, None),
    "3": (3, None),
    "8": (8, None),
    "2-no_pool": (2, _no_pool),
    "0": (0, None),
    "1": (1, None),
    "4": (4, None),
    "5": (5, None),
    "6": (6, None),
    "7": (7, None),
    "9": (9, None),
    "3-no_engram": (3, _no_engram),
    "8-no_drafter": (8, _no_drafter),
    "2-every_entry": (2, _every_entry),
    "3-encoder_only": (3, _encoder_only),
    "3-window_only": (3, _window_only),
    "8-fp8_experts": (8, _fp8_experts),
    "2-unquantised": (2, _unquantised),
}


class Drawn(NamedTuple):
    """A written checkpoint, its Engram classes, one sequence and its Hugging Face config."""

    folder: Path
    classes: np.ndarray
    ids: np.ndarray
    config: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        """Around the window's edge and the groups of two tokens; the last is the whole."""
        window = self.config["text_config"]["sliding_window"]
        return [1, 2, 3, window - 1, window, window + 1, len(self.ids)]

    def ragged(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The sequence cut at each of `lengths`, padded with other tokens."""
        text = self.config["text_config"]
        padding = np.random.default_rng(seed).integers(0, text["vocab_size"] - 3, len(self.ids))
        place, lengths = np.arange(len(self.ids)), np.array(self.lengths)
        return np.where(place < lengths[:, None], self.ids, padding), lengths

    def expected(self, **rules: bool) -> tuple[Model, Run]:
        """The transcription under these rules and its values for the whole sequence."""
        model = Model(self.folder, self.classes, Rules(**rules))
        return model, model.run(self.ids)

    def expected_draft(self, model: Model, run: Run, length: int) -> Draft:
        """The greedy block after the first `length` tokens."""
        part = Run()
        part.taps = run.taps[:length]
        return draft(model, part, int(run.logits[length - 1].argmax()))


def draw(name: str, root: Path) -> Drawn:
    """Writes a case under `root`."""
    seed, change = CASES[name]
    config = synthetic.draw_config(seed)
    if change is not None:
        change(config)
    folder = synthetic.write(root / name, config, seed=seed)
    text = config["text_config"]
    ids = np.random.default_rng(seed).integers(
        0, text["vocab_size"] - 3, 2 * text["sliding_window"] + 3
    )
    return Drawn(folder, token_map(folder / "tokenizer.json", text["vocab_size"]), ids, config)
