"""Named intermediates of a forward pass.

`Capture(names)` is handed down the model; a mechanism calls `add` with its name and layer, and only
the asked-for names are kept. Nothing else changes: with or without capture the other outputs are
computed by the same operations.

Names and shapes of the recorded arrays (r rows, one a token; n streams; k selected; L over layers):
  streams [r, n, d] before layer L (key L) and after the last (key number of layers); after_engram
  [r, n, d]; attn_in, attn_out, ffn_in, ffn_out [r, d]; pre_mix [r, n] handed from layer L to L + 1;
  routes int32 [r, k], route_weights f32 [r, k]; index_topk int32 [r, k] (-1 absent), candidates
  bool [r, blocks]; engram_rows int32 [r, columns]; taps [r, d]; collapsed, normed [r, d] (head
  input before and after the norm), logits f32 [r, vocab]; compressed_kv, index_keys [g, entries, c]
  as stored.
"""

from collections.abc import Iterable

from jaxtyping import Array, Shaped

NAMES = frozenset(
    [
        "streams",
        "after_engram",
        "attn_in",
        "attn_out",
        "ffn_in",
        "ffn_out",
        "pre_mix",
        "routes",
        "route_weights",
        "index_topk",
        "candidates",
        "engram_rows",
        "taps",
        "collapsed",
        "normed",
        "logits",
        "compressed_kv",
        "index_keys",
    ]
)
ROW_NAMES = NAMES - {"compressed_kv", "index_keys"}  # those with one entry a row


class Capture:
    """Collects the asked-for intermediates while a forward pass is traced."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        unknown = sorted(set(names) - NAMES)
        if unknown:
            raise ValueError(
                f"capture: unknown name {unknown[0]!r}; expected {', '.join(sorted(NAMES))}"
            )
        self.found: dict[str, dict[int, Array]] = {name: {} for name in names}

    def wants(self, name: str) -> bool:
        return name in self.found

    def add(self, name: str, layer: int, value: Shaped[Array, "..."]) -> None:
        """Keeps `value` if `name` was asked for."""
        if name in self.found:
            self.found[name][layer] = value
