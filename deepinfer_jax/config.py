"""Model configuration, layer schedule and numerics.

`ModelConfig` holds the numbers of one DeepSeek-V4.1 checkpoint as read from its Hugging Face
`config.json` (text fields are nested under `text_config` there). It is frozen and hashable, so it
is a static argument of every jitted function. `ModelConfig.plan` derives one `LayerPlan` a layer:
which cache the layer reads, which selection it reuses, whether it owns a compressor or an indexer,
and on which side of the encoder/decoder border it stands.

`Numerics` says how the same model is computed: arithmetic type, simulated activation and cache
quantisation, the batch-invariant mode and the prompt replay mode. It never changes which weights
are read.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from deepinfer_jax import schedule
from deepinfer_jax.schedule import LayerPlan

COMPUTE = ("bfloat16", "float32")
REPLAY = ("full", "mask", "compact")

SUPPORTED_MODEL_TYPES = ("deepseek_v41",)

# Keys of text_config whose only supported value is the released one: another value changes the
# mathematics.
_SECTIONS = ("rope_scaling", "weight_block_size", "dense_dtype", "expert_dtype", "vision")
_FIXED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "hc_shifted": True,
    "gate_temp": 1.0,
    "use_fp4_sparse_kv": True,
    "dspark_target_attn_input": True,
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN frequency interpolation, applied only with `compress_rope_theta` (no attention
    temperature)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Shape of the vision tower; its tensors are converted and counted, image input is refused for
    now."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The numbers of a DeepSeek-V4.1 model, named as in the released `config.json`.

    Raises `ValueError` with one line naming the field, its value and what was expected.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    weight_block_size: tuple[int, int] = (32, 32)
    dense_dtype: Literal["fp8", "bf16"] = "fp8"
    expert_dtype: Literal["fp4", "fp8", "bf16"] = "fp4"
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        schedule.validate(self)

    @functools.cached_property
    def plan(self) -> tuple[LayerPlan, ...]:
        """One entry a backbone layer."""
        return schedule.layer_plans(self)

    @functools.cached_property
    def draft_plan(self) -> tuple[LayerPlan, ...]:
        """One entry a DSpark stage: window attention only, over the draft rings."""
        return schedule.draft_plans(self)

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder half, or the number of layers if there is none."""
        return schedule.decoder_start(self)

    @property
    def replay_keep(self) -> int:
        """Prompt rows that the decoder half sees under `replay="mask"` and `"compact"`.

        A window and the rows one rejected draft block can roll back, rounded up to 8: 136 for the
        released model, and the same with speculation on or off.
        """
        needed = self.sliding_window + self.dspark_block_size + 1
        return -(-needed // 8) * 8

    @property
    def has_draft(self) -> bool:
        return self.num_nextn_predict_layers > 0

    @classmethod
    def from_json(cls, path: str | pathlib.Path) -> "ModelConfig":
        """Reads a Hugging Face `config.json` (a file, or a folder that holds one)."""
        file = pathlib.Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise ValueError(f"{file}: no such file; a model folder needs its config.json")
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}: not valid JSON ({error})") from error
        try:
            return cls.from_hf(raw)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Builds the config from the parsed dictionary of a `config.json`."""
        model_type = raw.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            known = ", ".join(SUPPORTED_MODEL_TYPES)
            raise ValueError(f"model_type {model_type!r} is not supported; supported: {known}")
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise ValueError(
                "text_config is missing; a deepseek_v41 config nests the text model under it"
            )
        for key, expected in _FIXED_VALUES.items():
            value = text.get(key, raw.get(key, expected))
            if value != expected:
                raise ValueError(f"{key} = {value!r} is not supported; expected {expected!r}")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in _SECTIONS:
                continue
            if field.name in text:
                values[field.name] = _typed(field, text[field.name])
            elif field.name in raw:
                values[field.name] = _typed(field, raw[field.name])
        values.setdefault("candidate_source_layer_id", None)
        _same_schedule({**raw, **text}, values)
        values["rope_scaling"] = _rope_scaling(text)
        values.update(_quantization(raw))
        values["vision"] = _vision(raw)
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.name not in values and field.default is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"missing field(s): {', '.join(missing)}")
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How the model is computed.

    compute: arithmetic type between modules; norms, mixes, router, softmax and logits are always
    float32.
    act_quant: quantise-dequantise the inputs of FP8/FP4 products (e4m3, groups of 32, power-of-two
    scales).
    cache_qdq: caches in their released formats (FP8 window, FP4 compressed entries and index keys),
    stored as bytes;
        without it they are stored in the compute type.
    invariant: a row's bits do not depend on how many rows are computed with it.
    replay: what the decoder half sees of a prompt: everything ("full"), or the last
    `ModelConfig.replay_keep` tokens,
        by narrowing the window ("mask") or by removing the other rows ("compact").
    """

    compute: str = "bfloat16"
    act_quant: bool = True
    cache_qdq: bool = True
    invariant: bool = False
    replay: str = "full"

    def __post_init__(self) -> None:
        for name, known in (("compute", COMPUTE), ("replay", REPLAY)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"numerics: {name} = {value!r}; expected {' or '.join(known)}")
        for name in ("act_quant", "cache_qdq", "invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"numerics: {name} = {getattr(self, name)!r}; expected True or False"
                )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "Numerics":
        """`reference` is the released code's numerics, `bf16` skips activation quantisation,
        `float32` also bfloat16."""
        if name not in _PRESETS:
            raise ValueError(f"numerics: no preset {name!r}; expected one of {', '.join(_PRESETS)}")
        known = [field.name for field in dataclasses.fields(cls)]
        for field in overrides:
            if field not in known:
                raise ValueError(f"numerics: no field {field!r}; expected {', '.join(known)}")
        return dataclasses.replace(_PRESETS[name], **overrides)


_PRESETS: dict[str, Numerics] = {
    "reference": Numerics(),
    "bf16": Numerics(act_quant=False),
    "float32": Numerics(compute="float32", act_quant=False),
}


def _typed(field: dataclasses.Field[Any], value: Any) -> Any:
    """A JSON value as the field's type: JSON has whole floats as integers, tuples as lists."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if field.type is float and (whole or isinstance(value, float)):
        return float(value)
    if field.type == tuple[int, ...] and isinstance(value, list):
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return tuple(value)
    elif (field.type is int and whole) or (field.type == int | None and (whole or value is None)):
        return value
    expected = {float: "a number", int: "an integer", int | None: "an integer or null"}
    raise ValueError(f"{field.name} = {value!r}; expected {expected.get(field.type, 'integers')}")


def _same_schedule(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuses a second spelling of the schedule that contradicts the first: sources of index keys,
    and the `layer_types` and `compress_rates` that libraries write for `compress_ratios`."""
    sources = list(values.get("kv_source_layer_ids", ()))
    keys = given.get("index_k_source_layer_ids")
    if keys not in (None, sources):
        raise ValueError(
            f"index_k_source_layer_ids = {keys!r} is not supported; "
            f"expected kv_source_layer_ids = {sources}"
        )
    kinds, rates = given.get("layer_types"), given.get("compress_rates")
    if kinds is None and rates is None:
        return
    if not isinstance(kinds, list) or not isinstance(rates, Mapping):
        raise ValueError(
            f"layer_types = {kinds!r}, compress_rates = {rates!r}; expected a list of kinds and a "
            "table of their rates"
        )
    said = [0 if kind == "sliding_attention" else rates.get(kind) for kind in kinds]
    ratios, layers = list(values.get("compress_ratios", ())), values.get("num_hidden_layers")
    if said not in (ratios, ratios[:layers]):
        raise ValueError(
            f"layer_types and compress_rates say ratios {said}, which contradicts "
            f"compress_ratios = {ratios}"
        )


def _rope_scaling(text: Mapping[str, Any]) -> RopeScaling:
    raw = text.get("rope_scaling")
    if not isinstance(raw, Mapping):
        raise ValueError("rope_scaling is missing; expected a yarn section")
    kind = raw.get("rope_type", raw.get("type"))
    if kind != "yarn":
        raise ValueError(f"rope_scaling.rope_type = {kind!r} is not supported; expected 'yarn'")
    return RopeScaling(**_section("rope_scaling", RopeScaling, raw))


def _quantization(raw: Mapping[str, Any]) -> dict[str, Any]:
    section = raw.get("quantization_config")
    if section is None:
        return {"dense_dtype": "bf16", "expert_dtype": "bf16"}
    method = section.get("quant_method")
    if method != "fp8":
        raise ValueError(
            f"quantization_config.quant_method = {method!r} is not supported; expected 'fp8'"
        )
    block = section.get("weight_block_size")
    if not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(
            f"quantization_config.weight_block_size = {block!r}; expected two positive integers"
        )
    for key, expected in (("scale_fmt", "ue8m0"), ("activation_scheme", "dynamic")):
        value = section.get(key, expected)
        if value != expected:
            raise ValueError(
                f"quantization_config.{key} = {value!r} is not supported; expected {expected!r}"
            )
    found: dict[str, Any] = {"weight_block_size": tuple(block)}
    # `dense_dtype` is ours: written for a checkpoint whose dense matrices alone are unquantised.
    for key, known in (("expert_dtype", ("fp4", "fp8", "bf16")), ("dense_dtype", ("fp8", "bf16"))):
        found[key] = section.get(key, "fp8")
        if found[key] not in known:
            raise ValueError(
                f"quantization_config.{key} = {found[key]!r}; expected one of {', '.join(known)}"
            )
    return found


def _vision(raw: Mapping[str, Any]) -> VisionConfig | None:
    section = raw.get("vision_config")
    if not isinstance(section, Mapping) or section.get("num_hidden_layers", 0) == 0:
        return None
    return VisionConfig(**_section("vision_config", VisionConfig, section))


def _section(name: str, kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    fields = dataclasses.fields(kind)
    missing = [field.name for field in fields if field.name not in raw]
    if missing:
        raise ValueError(f"{name}: missing {', '.join(missing)}")
    return {field.name: _typed(field, raw[field.name]) for field in fields}
