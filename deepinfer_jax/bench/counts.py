"""FLOP and bytes of one step, counted from the config alone: what any implementation has to do.

FLOP are products only: 2 m n k of every matrix product, for a row of width d (c: head_dim, H heads,
r: q_rank, o: o_rank, n streams, ff: expert width, k experts a row, V words):

    attention   2 (d r + r H c + d c + H c o + o_groups o d)     core   4 H c keys
    compressor  2 (d c + c i), with a gate 2 (2 d c + c i)       index  2 (r + entries) h i + 2 d h
    experts     2 * 3 d ff k, shared 2 * 3 d ff, router 2 d E    mHC    2 * 2 (2n + n^2) n d
    engram      2 (n + 1) d * columns * dim                      head   2 d V

Bytes are the fewest that pass between memory and the chip: each weight in its stored form once
(an expert only if some row is likely to want it, E (1 - (1 - 1/E)^pairs)), each cache entry that a
sequence's rows read once, each new entry written once. Intermediate results are not counted.

`Keys` says how many keys are read: `needed` counts those a causal row can see, `slots` those of the
fixed shapes a program executes. A rank of an expert-parallel group holds `held` experts and gets as
many (row, expert) pairs as its own rows send away, which is what even routing gives.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.schedule import LayerPlan

Number = int | float
Parts = Mapping[str, Number]
MX = 32
GATHERED = 16  # channels that share a scale in a compressed entry
PAGE = 128


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOP and bytes by part of the model."""

    flop: Parts
    bytes: Parts

    @property
    def flops(self) -> float:
        return sum(self.flop.values(), 0.0)

    @property
    def moved(self) -> float:
        return sum(self.bytes.values(), 0.0)

    def __add__(self, other: "Work") -> "Work":
        return Work(_sum(self.flop, other.flop), _sum(self.bytes, other.bytes))


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys of all rows of a call in one layer, by the ratio of its compressed cache.

    window: pairs of a row and a window key; read: ring entries that are read. selected, scored:
    pairs of a row and a compressed entry that it attends to, whose index key it scores (0: in
    layers that look into the candidate pool only). entries: that the sequences have.
    """

    window: Number
    read: Number
    selected: Mapping[int, Number]
    scored: Mapping[int, Number]
    entries: Mapping[int, Number]


@dataclasses.dataclass(frozen=True)
class Rows:
    """`sequences` of `width` rows each, at positions from `start` on."""

    sequences: int
    width: int
    start: int = 0

    @property
    def count(self) -> int:
        return self.sequences * self.width

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.width)


def needed(cfg: ModelConfig, rows: Rows) -> Keys:
    """The keys that causal attention of these rows reads."""
    see = cfg.sliding_window
    pool = cfg.candidate_topk_blocks * cfg.candidate_block_size

    def by_ratio(most: int) -> dict[int, float]:
        return {
            ratio: float(rows.sequences * sum(min((p + 1) // ratio, most) for p in rows.positions))
            for ratio in (1, 2)
        }

    far = 1 << 62
    scored = by_ratio(far)
    end = rows.start + rows.width
    return Keys(
        window=float(rows.sequences * sum(min(p + 1, see) for p in rows.positions)),
        read=float(rows.sequences * min(rows.start, see - 1)),
        selected=by_ratio(cfg.index_topk),
        scored=scored if pool == 0 else {**scored, 0: by_ratio(pool)[1]},
        entries={ratio: float(rows.sequences * (end // ratio)) for ratio in (1, 2)},
    )


def slots(cfg: ModelConfig, rows: Rows, *, tokens: int, places: int | None = None) -> Keys:
    """The keys of the shapes that a program executes. tokens: those a page table has room for;
    places: rows of a sequence that the indexer's rectangle has (default: its width)."""
    found = needed(cfg, rows)
    wide = rows.sequences * (rows.width if places is None else places)
    held = {ratio: float(-(-tokens // PAGE) * PAGE // ratio) for ratio in (1, 2)}
    return dataclasses.replace(
        found,
        window=float(rows.count * cfg.sliding_window),
        selected={ratio: float(rows.count * cfg.index_topk) for ratio in held},
        scored={**{ratio: wide * held[ratio] for ratio in held}, 0: wide * held[1]},
        entries={ratio: rows.sequences * held[ratio] for ratio in held},
    )


def decode(
    cfg: ModelConfig,
    rows: Rows,
    *,
    keys: Keys | None = None,
    ranks: int = 1,
    draft: bool = False,
    layers: Sequence[int] | None = None,
) -> Work:
    """One decode step; `width` rows a sequence are verified. ranks: of the expert-parallel group.

    draft: the context of all rows goes into the draft rings and a block is drafted. layers: a layer
    slice: these layers and nothing around them.
    """
    keys = needed(cfg, rows) if keys is None else keys
    plans = cfg.plan if layers is None else [cfg.plan[i] for i in layers]
    work = total(layer(cfg, plan, rows.count, keys, ranks) for plan in plans)
    if layers is not None:
        return work
    work += embedding(cfg, rows.count) + head(cfg, rows.count)
    if draft:
        work += remember(cfg, rows.count) + draft_block(cfg, rows.sequences, ranks)
    return work


def prefill(
    cfg: ModelConfig,
    rows: Rows,
    *,
    keys: Keys | None = None,
    kept_keys: Keys | None = None,
    replay: str = "full",
    ranks: int = 1,
    draft: bool = False,
    layers: Sequence[int] | None = None,
) -> Work:
    """Whole chunks that end their prompts. With replay "compact" the decoder half sees the last
    `replay_keep` rows of each (`kept_keys`), of the others only its KV source's entries."""
    keys = needed(cfg, rows) if keys is None else keys
    plans = cfg.plan if layers is None else [cfg.plan[i] for i in layers]
    kept, border = rows, cfg.decoder_start
    if replay == "compact":
        width = min(cfg.replay_keep, rows.width)
        kept = Rows(rows.sequences, width, rows.start + rows.width - width)
        kept_keys = needed(cfg, kept) if kept_keys is None else kept_keys
    else:
        kept_keys = keys
    work = total(
        layer(cfg, plan, rows.count, keys, ranks)
        if plan.index < border or replay != "compact"
        else layer(cfg, plan, kept.count, kept_keys, ranks, produced=plan.index == border)
        for plan in plans
    )
    if replay == "compact":
        work += total(produce(cfg, plan, rows.count) for plan in plans if plan.index == border)
    if layers is not None:
        return work
    work += embedding(cfg, rows.count) + head(cfg, rows.sequences)
    if draft:
        work += remember(cfg, kept.count) + draft_block(cfg, rows.sequences, ranks)
    return work


def layer(
    cfg: ModelConfig,
    plan: LayerPlan,
    rows: int,
    keys: Keys,
    ranks: int = 1,
    *,
    produced: bool = False,
) -> Work:
    """One backbone layer on all rows; produced: its compressed entries are counted elsewhere."""
    work = _attention(cfg, rows) + moe(
        cfg, rows, cfg.n_routed_experts, cfg.num_experts_per_tok, ranks
    )
    attended = keys.window + (keys.selected[plan.ratio] if plan.ratio else 0.0)
    ring, entry, _ = _entry_bytes(cfg)
    read = {"window": ring * keys.read}
    if plan.ratio:
        read["entries"] = entry * min(keys.selected[plan.ratio], keys.entries[plan.ratio])
    work += Work({"attention core": _core(cfg, attended)}, read | {"written": ring * rows})
    if plan.mode in ("full", "reindex"):
        work += _index(cfg, plan, rows, keys)
    if plan.mode == "full" and not produced:
        work += produce(cfg, plan, rows)
    if plan.engram:
        work += engram(cfg, rows)
    return work


def produce(cfg: ModelConfig, plan: LayerPlan, rows: int) -> Work:
    """Compressed entries and index keys of a source layer."""
    gates = 2 if plan.ratio > 1 else 1
    weights = gates * cfg.hidden_size * cfg.head_dim + cfg.head_dim * cfg.index_head_dim
    _, entry, key = _entry_bytes(cfg)
    return Work(
        {"compressor": 2.0 * rows * weights},
        {"weights": 2.0 * weights, "written": (entry + key) * rows / plan.ratio},
    )


def moe(cfg: ModelConfig, rows: int, experts: int, chosen: int, ranks: int = 1) -> Work:
    """Router, this rank's experts with their pairs, shared expert."""
    one = 3 * cfg.hidden_size * cfg.moe_intermediate_size
    held, pairs = experts / ranks, rows * chosen
    hit = held * (1 - (1 - 1 / held) ** pairs) if held > 1 else 1.0
    return Work(
        {
            "router": 2.0 * rows * cfg.hidden_size * experts,
            "experts": 2.0 * pairs * one,
            "shared expert": 2.0 * rows * one,
        },
        {
            "weights": 2.0 * cfg.hidden_size * experts + _dense(cfg, one),
            "experts": hit * one * _EXPERT_BYTES[cfg.expert_dtype],
        },
    )


def engram(cfg: ModelConfig, rows: int) -> Work:
    """The projection, and the rows of the table."""
    columns = (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
    wide = columns * cfg.engram_head_dim
    weights = (cfg.hc_mult + 1) * cfg.hidden_size * wide
    return Work(
        {"engram": 2.0 * rows * weights},
        {"weights": _dense(cfg, weights), "engram rows": rows * wide * (1 + 1 / MX)},
    )


def embedding(cfg: ModelConfig, rows: int) -> Work:
    return Work({}, {"embedding rows": 2.0 * rows * cfg.hidden_size})


def head(cfg: ModelConfig, rows: int) -> Work:
    size = cfg.vocab_size * cfg.hidden_size
    return Work({"head": 2.0 * rows * size}, {"weights": 2.0 * size})


def remember(cfg: ModelConfig, rows: int) -> Work:
    """Context of processed rows for the draft rings."""
    width, stages = cfg.hidden_size, cfg.num_nextn_predict_layers
    project = len(cfg.dspark_target_layer_ids) * width * width
    per_row = project + stages * width * cfg.head_dim
    ring, _, _ = _entry_bytes(cfg)
    # The stages' wkv are read here and for the block's own rows: counted there.
    moved = {"weights": _dense(cfg, project), "written": ring * rows * stages}
    return Work({"draft": 2.0 * rows * per_row}, moved)


def draft_block(cfg: ModelConfig, sequences: int, ranks: int = 1) -> Work:
    """The stages, head and Markov head on a block of every sequence."""
    block, see = cfg.dspark_block_size, cfg.sliding_window
    rows, words, rank = sequences * block, cfg.vocab_size, cfg.dspark_markov_rank
    ring, _, _ = _entry_bytes(cfg)
    stage = _attention(cfg, rows) + moe(
        cfg, rows, cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok, ranks
    )
    core = _core(cfg, float(rows * (see + block)))
    stage += Work({"attention core": core}, {"window": ring * sequences * see})
    stages = total([stage] * cfg.num_nextn_predict_layers)
    per_row = cfg.hidden_size * words + rank * words + cfg.hidden_size + rank
    read = {name: value for name, value in stages.bytes.items() if name != "weights"}
    markov = 2.0 * (rank * words + rows * rank)  # the head's own weight is read by the step already
    return Work(
        {"draft": stages.flops + 2.0 * rows * per_row},
        read | {"weights": stages.bytes["weights"] + markov},
    )


def accepted(profile: Sequence[float]) -> float:
    """Tokens a step from a profile of conditional acceptance by place: 1 + a1 + a1 a2 + ..."""
    if wrong := [share for share in profile if not 0 <= share <= 1]:
        raise ValueError(f"acceptance: {wrong[0]}; expected shares between 0 and 1")
    tokens = stands = 1.0
    for share in profile:
        stands *= share
        tokens += stands
    return tokens


def total(works: Iterable[Work]) -> Work:
    return sum(works, Work({}, {}))


def _attention(cfg: ModelConfig, rows: int) -> Work:
    """Projections of one layer and both mHC predictors around its sublayers."""
    width, heads = cfg.hidden_size, cfg.num_attention_heads * cfg.head_dim
    weights = width * cfg.q_lora_rank + cfg.q_lora_rank * heads + width * cfg.head_dim
    weights += heads * cfg.o_lora_rank + cfg.o_groups * cfg.o_lora_rank * width
    streams = cfg.hc_mult
    mixes = 2 * (2 * streams + streams**2) * streams * width
    return Work(
        {"attention": 2.0 * rows * weights, "mHC": 2.0 * rows * mixes},
        {"weights": _dense(cfg, weights) + 4.0 * mixes},
    )


def _index(cfg: ModelConfig, plan: LayerPlan, rows: int, keys: Keys) -> Work:
    """Queries of the indexer and the scores of its source's keys."""
    heads, dim = cfg.index_n_heads, cfg.index_head_dim
    query, weight = cfg.q_lora_rank * heads * dim, cfg.hidden_size * heads
    scored = keys.scored.get(0) if plan.candidate_limited else keys.scored[plan.ratio]
    scored = keys.scored[plan.ratio] if scored is None else scored
    _, _, key = _entry_bytes(cfg)
    return Work(
        {"indexer": 2.0 * rows * (query + weight), "index scores": 2.0 * scored * heads * dim},
        {
            "weights": _dense(cfg, query) + 2.0 * weight,
            "index keys": key * min(scored, keys.entries[plan.ratio]),
        },
    )


def _core(cfg: ModelConfig, pairs: Number) -> float:
    """Scores and values of attention, for pairs of a row and a key."""
    return 4.0 * cfg.num_attention_heads * cfg.head_dim * pairs


def _entry_bytes(cfg: ModelConfig) -> tuple[float, float, float]:
    """A window row (e4m3), a compressed entry and an index key (e2m1), with their scales."""
    return (
        cfg.head_dim * (1 + 1 / MX),
        cfg.head_dim * (0.5 + 1 / GATHERED),
        cfg.index_head_dim * (0.5 + 1 / MX),
    )


def _dense(cfg: ModelConfig, size: int) -> float:
    rows, cols = cfg.weight_block_size
    return size * (2.0 if cfg.dense_dtype == "bf16" else 1 + 1 / (rows * cols))


_EXPERT_BYTES = {"fp4": 0.5 + 1 / MX, "fp8": 1 + 1 / MX**2, "bf16": 2.0}


def _sum(one: Parts, other: Parts) -> dict[str, Number]:
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in {**one, **other}}
