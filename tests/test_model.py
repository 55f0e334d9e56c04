"""Shapes of decoders: parameter counts of published models, what may be typed, and what a config.json becomes."""

from __future__ import annotations

from typing import Any

import pytest

from llmprof.errors import WorkloadError
from llmprof.schema.hf_config import read_hf_config
from llmprof.schema.model import parse_model, read_model, shape_from_hf_config

LLAMA_8B = "llama:layers=32,hidden=4096,ffn=14336,heads=32,kv_heads=8,vocab=128256"


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("llama:layers=32,hidden=4096,heads=32", 6_738_415_616),
        (LLAMA_8B, 8_030_261_248),
        ("llama:layers=80,hidden=8192,ffn=28672,heads=64,kv_heads=8,vocab=128256", 70_553_706_496),
        ("mixtral:layers=32,hidden=4096,ffn=14336,heads=32,kv_heads=8", 46_702_792_704),
        ("gpt:layers=12,hidden=768,heads=12,seq=1024", 124_439_808),
    ],
)
def test_parameters_are_those_of_published_models(text: str, published: int) -> None:
    assert parse_model(text).parameters == published


def test_a_token_of_mixtral_meets_two_of_eight_experts() -> None:
    shape = parse_model("mixtral:layers=32,hidden=4096,ffn=14336,heads=32,kv_heads=8")
    one_expert = 3 * 4096 * 14336
    assert shape.parameters - shape.active_parameters == 32 * 6 * one_expert
    dense = parse_model(LLAMA_8B)
    assert dense.active_parameters == dense.parameters


def test_what_is_not_typed_is_said() -> None:
    read = read_model("llama:layers=2,hidden=4096,heads=32,vocab=100")
    assert read.assumption == "defaults of family llama: ffn=11008, kv_heads=32, seq=4096"
    assert read_model("llama:layers=2,hidden=64,ffn=256,heads=4,kv_heads=2,vocab=10,seq=8").assumption == ""
    gpt = parse_model("gpt:layers=2,hidden=64,heads=4,tied=0,norm=rmsnorm")
    assert (gpt.ffn, gpt.gated, gpt.bias, gpt.tied, gpt.norm) == (256, False, True, False, "rmsnorm")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "model family ''", "for example llama:layers"),
        ("lama:layers=3", "'lama' is not one of", "did you mean llama?"),
        ("llama-7b", "names of models are not looked up", "llama"),
        ("llama", "does not give layers, hidden, heads", "for example"),
        ("llama:layers=2,hidden=64", "does not give heads", "for example"),
        ("llama:layrs=3", "model key 'layrs'", "did you mean layers"),
        ("llama:layers=3,layers=4,hidden=64,heads=4", "layers is given twice", "once"),
        ("llama:layers=x,hidden=64,heads=4", "layers=x is not a whole number", "digits"),
        ("llama:layers=-1,hidden=64,heads=4", "layers=-1 is not a whole number", "digits"),
        ("llama:layers=\u0663,hidden=64,heads=4", "is not a whole number", "digits"),
        ("gpt:layers=0,hidden=64,heads=4", "layers=0 is not between 1 and 9000", "range"),
        ("llama:layers=9" + "9" * 400 + ",hidden=64,heads=4", "is not a whole number", "digits"),
        ("llama:layers=2,hidden=2000000,heads=4", "hidden=2000000 is not between", "range"),
        ("llama:layers=2,hidden=10,heads=3", "hidden=10 is not a multiple of heads=3", "heads=2"),
        ("llama:layers=2,hidden=64,heads=4,kv_heads=3", "heads=4 is not a multiple of kv_heads=3", "divisor"),
        ("moe:layers=2,hidden=64,heads=4,experts=4,topk=8", "topk=8 of experts=4", "between 1 and 4"),
        ("llama:layers=2,hidden=64,heads=4,topk=1", "topk=1 needs experts", "leave topk out"),
        ("moe:layers=2,hidden=64,heads=4,dense_layers=3", "dense_layers=3 of layers=2", "dense_layers=2"),
        ("llama:layers=2,hidden=64,heads=4,norm=rms", "norm=rms is not one of", "rmsnorm"),
        ("llama:layers=2,hidden=64,heads=4,tied=maybe", "tied=maybe is neither 0 nor 1", "tied=1"),
    ],
)
def test_a_wrong_model_is_refused_in_one_line(text: str, message: str, hint: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_model(text)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def config(model_type: str, **more: Any) -> dict[str, Any]:
    """The part of a config.json that every Llama-like model has (Llama 3 8B)."""
    return {
        "model_type": model_type,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        **more,
    }


def test_a_config_of_llama_gives_the_published_model() -> None:
    shape, notes = read_hf_config(config("llama"))
    assert shape.parameters == 8_030_261_248
    assert notes == ("sequence length 4096, not the 8192 positions that the config allows",)


def test_configs_of_other_families() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024}
    assert shape_from_hf_config({**gpt2, "vocab_size": 50257}).parameters == 124_439_808
    mixtral = config("mixtral", vocab_size=32000, num_local_experts=8, num_experts_per_tok=2)
    assert shape_from_hf_config(mixtral).parameters == 46_702_792_704
    # EleutherAI/pythia-1b: 1,011,781,632 parameters as published
    neox = config(
        "gpt_neox",
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=8,
        num_key_value_heads=None,
        vocab_size=50304,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    assert shape_from_hf_config(neox).parameters == 1_011_781_632


def test_experts_beside_a_shared_one_and_a_dense_start() -> None:
    shape, _ = read_hf_config(
        config(
            "deepseek",
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
        )
    )
    assert (shape.experts, shape.topk, shape.expert_ffn) == (64, 6, 1408)
    assert (shape.shared_ffn, shape.dense_layers) == (2816, 1)


def test_what_a_shape_leaves_out_is_said() -> None:
    _, notes = read_hf_config(config("qwen3", head_dim=128, sliding_window=1024, mlp_bias=True))
    assert "qwen3: norms of queries and keys are left out" in notes
    assert "attention over the whole sequence, not in the config's window of 1024 tokens" in notes
    assert "biases of the attention or feed-forward projections alone are left out" in notes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not one of"),
        ({"model_type": None}, "model_type 'None' is not one of"),
        ({"kv_lora_rank": 512}, "multi-head latent attention (kv_lora_rank)"),
        ({"vision_config": {"hidden_size": 1}}, "a vision tower"),
        ({"hidden_size": None}, "hidden_size=None, but hidden is a whole number"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads=8, not a whole number"),
        ({"num_hidden_layers": 10**9}, "layers=1000000000 is not between"),
        ({"is_encoder_decoder": True}, "cross-attention"),
    ],
)
def test_a_config_that_is_no_plain_decoder_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        shape_from_hf_config({**config("llama"), **changes})
    assert message in caught.value.message


def test_dense_layers_between_experts_are_refused() -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    assert shape_from_hf_config(config("qwen3_moe", **moe, mlp_only_layers=[0, 1])).dense_layers == 2
    for changes in ({"mlp_only_layers": [5]}, {"decoder_sparse_step": 2}):
        with pytest.raises(WorkloadError, match="at its start only"):
            shape_from_hf_config(config("qwen3_moe", **moe, **changes))
