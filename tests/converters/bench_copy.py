"""Conversion against a plain copy of the same bytes: `python tests/converters/bench_copy.py DIR`.

Writes a synthetic checkpoint of about --gib under DIR, then alternates plain copies (one file after
another, one sync at the end) with conversions there and back, each from a cold page cache where the
process may drop it. Prints rates with their processor time and load, and the ratios of the best.
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from converters import from_hf, synthetic, to_hf

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def config(gib: float) -> dict:
    """Layers with experts of the release's width, few of them, and an Engram table."""
    made = synthetic.draw_config(1)
    text = made["text_config"]
    text |= {"hidden_size": 2560, "moe_intermediate_size": 2304, "head_dim": 512}
    text |= {"q_lora_rank": 1280, "o_lora_rank": 512, "engram_head_dim": 256}
    depth = text["num_hidden_layers"]
    text["n_routed_experts"] = max(2, int(gib * 2**30 * 0.6 / depth / 9.4e6))
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    tables = len(text["engram_layer_ids"])
    text["engram_vocab_size"] = int(gib * 2**30 * 0.3 / columns / tables / 264)
    return made


def copy(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds, durable on the disk, and this process's processor seconds."""
    os.sync()
    if os.access(DROP_CACHES, os.W_OK):
        DROP_CACHES.write_text("3")
    began, used = time.monotonic(), time.process_time()
    work()
    os.sync()
    return time.monotonic() - began, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    root = options.folder / "bench_copy"
    root.mkdir()
    try:
        source = synthetic.write(root / "source", config(options.gib), shards=4)
        size = sum(file.stat().st_size for file in source.iterdir())
        print(f"{size / 1e9:.2f} GB")
        best: dict[str, float] = {}
        for _ in range(options.rounds):
            for name, work in {
                "copy": lambda: copy(source, root / "copy"),
                "from_hf": lambda: from_hf.convert(
                    source, root / "out", workers=options.workers, quiet=True
                ),
                "to_hf": lambda: to_hf.convert(
                    root / "out", root / "back", workers=options.workers, quiet=True
                ),
            }.items():
                wall, used = timed(work)
                best[name] = min(best.get(name, 1e9), wall)
                load = os.getloadavg()[0]
                print(
                    f"  {name}: {size / wall / 1e6:.0f} MB/s, {used / size * 1e9:.2f} CPU-s/GB, "
                    f"load {load:.1f}",
                    flush=True,
                )
            for name in ("copy", "out", "back"):
                shutil.rmtree(root / name)
        for name in ("from_hf", "to_hf"):
            print(f"{name}: {100 * best['copy'] / best[name]:.0f}% of a plain copy")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
