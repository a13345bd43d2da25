"""What a config.json may not say: every message of the validation, each reached by one mistake."""

import ast
import copy
import inspect
import json
import traceback
from types import ModuleType
from typing import Any

import pytest

from deepinfer_jax import config, schedule, shipped
from deepinfer_jax.config import ModelConfig, Numerics
from tests.runtime.small_model import CONFIG

NO_DRAFTER = {
    "num_nextn_predict_layers": 0,
    "compress_ratios": [0, 2, 1, 1, 1],
    "dspark_target_layer_ids": [],
}
KINDS = ["sliding_attention", "pairs", "each", "each", "each"]
COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)


def yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": CONFIG["text_config"]["rope_scaling"] | changes}


# What is changed in text_config, and the message.
TEXT: list[tuple[dict[str, Any], str]] = [
    *(({name: 0}, f"^{name} = 0; expected a positive integer") for name in COUNTS),
    *(
        ({name: bad}, f"^{name} = {bad!r}; expected a positive, finite number")
        for name in ("routed_scaling_factor", "swiglu_limit", "rms_norm_eps", "hc_eps")
        for bad in (-1.0, float("inf"))
    ),
    *(
        ({name: 1.0}, f"^{name} = 1.0; expected a finite number above 1")
        for name in ("rope_theta", "compress_rope_theta")
    ),
    (yarn(factor=0), "^rope_scaling.factor = 0.0; expected a positive number"),
    (yarn(rope_type="linear"), "^rope_scaling.rope_type = 'linear' .* expected 'yarn'"),
    ({"rope_scaling": None}, "^rope_scaling is missing"),
    ({"rope_scaling": {"type": "yarn", "factor": 2}}, "^rope_scaling: missing beta_fast, beta_sl"),
    ({"num_nextn_predict_layers": -1}, "^num_nextn_predict_layers = -1; expected 0 or more"),
    ({"hidden_size": 48}, "^hidden_size = 48; expected a multiple of 32"),
    ({"head_dim": 48}, "^head_dim = 48; expected a multiple of 32"),
    ({"moe_intermediate_size": 48}, "^moe_intermediate_size = 48; expected a multiple of 32"),
    ({"index_head_dim": 48}, "^index_head_dim = 48; expected a multiple of 32"),
    ({"engram_head_dim": 48}, "^engram_head_dim = 48; expected a multiple of 32"),
    ({"qk_rope_head_dim": 15}, "^qk_rope_head_dim = 15; expected even, 2..32"),
    ({"head_dim": 64, "qk_rope_head_dim": 48}, "^index_head_dim = 32; expected at least 48"),
    ({"o_groups": 3}, "^o_groups = 3; expected a divisor of num_attention_heads = 2"),
    ({"num_experts_per_tok": 5}, "^num_experts_per_tok = 5; expected at most .* = 4"),
    ({"dspark_num_experts_per_tok": 3}, "^dspark_num_experts_per_tok = 3; expected at most .* = 2"),
    # One entry a layer and draft stage; V4 writes 4 and 128, and 1 where nothing is compressed.
    ({"compress_ratios": [0, 2, 1, 1, 1]}, "^compress_ratios = '5 entries'; .* = 6 entries"),
    ({"compress_ratios": [0, 4, 128, 1, 1, 0]}, "^compress_ratios = .*; expected only 0, 1 and 2"),
    ({"compress_ratios": [0, 2, 1, 1, 1, 1]}, "^compress_ratios = .*; expected 0 for every draft"),
    ({"compress_ratios": [1, 2, 1, 1, 1, 0]}, "^kv_source_layer_ids = 1; expected no source above"),
    ({"compress_ratios": [0, 2, 2, 1, 1, 0]}, "^compress_ratios.3. = 1; expected 2, the ratio of"),
    ({"compress_ratios": [0, 0, 1, 1, 1, 0]}, "^index_source_layer_ids = 1; expected layers with"),
    ({"kv_source_layer_ids": [2, 1]}, "^kv_source_layer_ids = .2, 1.; expected increasing"),
    ({"index_source_layer_ids": [1, 2, 5]}, "^index_source_layer_ids = .* num_hidden_layers = 5"),
    ({"kv_source_layer_ids": [1, 2, 3]}, "^kv_source_layer_ids = 3; .* in index_source_layer_ids"),
    ({"kv_source_layer_ids": [2]}, "^kv_source_layer_ids = .2,.; expected a source at or below"),
    (
        {"kv_source_layer_ids": [1, 2, 4]},
        "^kv_source_layer_ids = 4; expected no source above layer 2, the one that all of the",
    ),
    ({"candidate_source_layer_id": 1}, "^candidate_source_layer_id = 1; .* KV source of ratio 1"),
    ({"engram_num_embeddings": []}, "^engram_num_embeddings = .*; expected one entry for each"),
    ({"engram_max_ngram_size": 1}, "^engram_max_ngram_size = 1; expected at least 2"),
    ({"engram_compressed_vocab_size": 131073}, "^engram_compressed_vocab_size = .* at most 131072"),
    ({"engram_pad_token_id": 512}, "^engram_pad_token_id = 512; expected a token id below 512"),
    ({"engram_layer_ids": [2]}, "^engram_layer_ids = .2,.; expected layers of the encoder half"),
    ({"dspark_target_layer_ids": []}, r"^dspark_target_layer_ids = \(\); expected at least one"),
    ({"dspark_target_layer_ids": [1, 4]}, "^dspark_target_layer_ids = .1, 4.; .* from 2 on"),
    ({"dspark_noise_token_id": 512}, "^dspark_noise_token_id = 512; expected a token id below 512"),
    ({**NO_DRAFTER, "dspark_block_size": -1}, "^dspark_block_size = -1; expected 0 or more"),
    ({"hc_eps": None}, "^hc_eps = None; expected a number"),
    ({"vocab_size": True}, "^vocab_size = True; expected an integer"),
    ({"candidate_source_layer_id": "2"}, "^candidate_source_layer_id = '2'; .* integer or null"),
    ({"engram_layer_ids": 1}, "^engram_layer_ids = 1; expected integers"),
    ({"hidden_act": "gelu"}, "^hidden_act = 'gelu' is not supported; expected 'silu'"),
    ({"gate_temp": 2}, "^gate_temp = 2 is not supported; expected 1.0"),
    ({"use_fp4_sparse_kv": False}, "^use_fp4_sparse_kv = False is not supported"),
    ({"dspark_target_attn_input": False}, "^dspark_target_attn_input = False is not supported"),
    ({"index_k_source_layer_ids": [1]}, r"^index_k_source_layer_ids = .1. .*_ids = \[1, 2\]"),
    ({"layer_types": KINDS}, "^layer_types = .*, compress_rates = None; expected a list of kinds"),
    (
        {"layer_types": KINDS, "compress_rates": {"pairs": 4, "each": 1}},
        r"^layer_types and compress_rates say ratios \[0, 4, 1, 1, 1\], which contradicts compress",
    ),
]
# What is changed beside it.
WHOLE: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "deepseek_v4"}, "^model_type 'deepseek_v4' is not supported; supported: deep"),
    ({"text_config": None}, "^text_config is missing"),
    ({"bos_token_id": None}, "^bos_token_id = None; expected an integer"),
    ({"vision_config": {"num_hidden_layers": 2}}, "^vision_config: missing hidden_size, num_att"),
]
QUANTIZATION: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq"}, "quant_method = 'gptq' is not supported; expected 'fp8'"),
    ({"scale_fmt": "float"}, "scale_fmt = 'float' is not supported; expected 'ue8m0'"),
    ({"activation_scheme": "static"}, "activation_scheme = 'static' .* expected 'dynamic'"),
    ({"expert_dtype": "int4"}, "expert_dtype = 'int4'; expected one of fp4, fp8, bf16"),
    ({"dense_dtype": "fp4"}, "dense_dtype = 'fp4'; expected one of fp8, bf16"),
    *(
        ({"weight_block_size": bad}, "weight_block_size = .*; expected two positive integers")
        for bad in (None, [32, True], [32], [32, 0], [32.0, 32])
    ),
    ({"weight_block_size": [128, 128]}, r"^weight_block_size = \[128, 128\]; expected \[32, 32\]"),
]
CASES = [
    *(({"text_config": CONFIG["text_config"] | change}, message) for change, message in TEXT),
    *WHOLE,
    *(
        ({"quantization_config": CONFIG["quantization_config"] | change}, message)
        for change, message in QUANTIZATION
    ),
]


@pytest.mark.parametrize(("change", "message"), CASES, ids=[message for _, message in CASES])
def test_one_line_names_the_field_and_what_was_expected(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_hf(CONFIG | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("left_out", ["vocab_size", "engram_layer_ids", "dspark_block_size"])
def test_a_missing_field_is_named(left_out):
    raw = copy.deepcopy(CONFIG)
    del raw["text_config"][left_out]
    with pytest.raises(ValueError, match=f"^missing field.s.: {left_out}"):
        ModelConfig.from_hf(raw)


def checks(module: ModuleType, within: str) -> dict[str, range]:
    """Lines of the expectations and errors in a module's functions whose names begin so."""
    found = {}
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(function, ast.FunctionDef) and function.name.startswith(within):
            for node in ast.walk(function):
                called = getattr(getattr(node, "func", None), "id", None)
                if isinstance(node, ast.Raise) or called in ("_expect", "_positive"):
                    end = node.end_lineno or node.lineno
                    found[f"{function.name}:{node.lineno}"] = range(node.lineno, end + 1)
    return found


def test_every_check_has_a_case():
    """A check that no case reaches is one that nobody has seen fail."""
    reached = set()
    for change, _ in CASES:
        with pytest.raises(ValueError) as caught:
            ModelConfig.from_hf(CONFIG | change)
        reached |= {(at.filename, at.lineno) for at in traceback.extract_tb(caught.tb)}
    for module, within in (
        (schedule, "_validate"),
        (config, "_quantization"),
        (config, "_same_schedule"),
        (config, "_rope_scaling"),
        (config, "_section"),
        (config, "_typed"),
    ):
        for name, lines in checks(module, within).items():
            assert any((module.__file__, line) in reached for line in lines), name


@pytest.mark.parametrize("name", ["v41-flash", "v41-tiny"])
def test_second_spellings_that_agree_and_defaults_written_out(name):
    raw = json.loads(shipped.find("models", name).read_text())
    text = raw["text_config"]
    plain = ModelConfig.from_hf(raw)
    kinds = {0: "sliding_attention", 1: "each", 2: "pairs"}
    text |= {
        "layer_types": [kinds[ratio] for ratio in text["compress_ratios"]],
        "compress_rates": {"pairs": 2, "each": 1},
        "index_k_source_layer_ids": text["kv_source_layer_ids"],
        "gate_temp": 1.0,
        "use_fp4_sparse_kv": True,
        "dspark_target_attn_input": True,
        "hc_shifted": True,
    }
    assert ModelConfig.from_hf(raw) == plain
    text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    assert ModelConfig.from_hf(raw) == plain


def test_blocks_of_another_size_where_nothing_is_stored_in_them():
    section = {"weight_block_size": [128, 128], "dense_dtype": "bf16"}
    changed = CONFIG | {"quantization_config": CONFIG["quantization_config"] | section}
    assert ModelConfig.from_hf(changed).weight_block_size == (128, 128)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute": "float16"}, "compute = 'float16'; expected bfloat16 or float32"),
        ({"replay": "none"}, "replay = 'none'; expected full or mask or compact"),
    ],
)
def test_numerics(fields, message):
    with pytest.raises(ValueError, match=f"^numerics: {message}"):
        Numerics(**fields)
