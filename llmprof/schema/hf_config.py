"""A Hugging Face `config.json` becomes a ModelShape, with one sentence for everything that the shape leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from llmprof.errors import WorkloadError
from llmprof.schema.model import ModelShape

DEFAULT_SEQ = 4096
"""Sequence length of a request where rotary positions allow a longer one: contexts are seldom trained in full."""

_LLAMA_KEYS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size",
    "heads": "num_attention_heads", "vocab": "vocab_size", "seq": "max_position_embeddings",
}  # fmt: skip
_GPT2_KEYS = {
    "layers": "n_layer", "hidden": "n_embd", "ffn": "n_inner", "heads": "n_head", "vocab": "vocab_size",
    "seq": "n_positions",
}  # fmt: skip
_LAYERNORM: dict[str, Any] = {"gated": False, "norm": "layernorm", "bias": True}


class _Rule(NamedTuple):
    """How a `model_type` is read.

    Attributes:
        keys: config key of each size.
        fixed: what the architecture always has.
        tied: `tie_word_embeddings` where the file does not say.
        left_out: parts without a place in a ModelShape, one sentence.
        experts: config keys of (experts, topk, expert width), empty for dense models.
    """

    keys: dict[str, str] = _LLAMA_KEYS
    fixed: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    tied: bool = False
    left_out: str = ""
    experts: tuple[str, str, str] | tuple[()] = ()


_QK_NORMS = "norms of queries and keys are left out"
_MODEL_TYPES: dict[str, _Rule] = {
    "llama": _Rule(),
    "mistral": _Rule(),
    "phi3": _Rule(),
    "gemma": _Rule(tied=True),
    "qwen2": _Rule(left_out="biases of the query, key and value projections are left out"),
    "qwen3": _Rule(left_out=_QK_NORMS),
    "mixtral": _Rule(experts=("num_local_experts", "num_experts_per_tok", "intermediate_size")),
    "qwen3_moe": _Rule(
        left_out=_QK_NORMS, experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    ),
    "qwen2_moe": _Rule(
        left_out="biases of the query, key and value projections and the shared expert's gate are left out",
        experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    ),
    "deepseek": _Rule(experts=("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")),
    "gpt2": _Rule(keys=_GPT2_KEYS, fixed={**_LAYERNORM, "positions": "learned"}, tied=True),
    "gpt_bigcode": _Rule(keys=_GPT2_KEYS, fixed={**_LAYERNORM, "positions": "learned"}, tied=True),
    "gpt_neox": _Rule(
        fixed=_LAYERNORM, left_out="attention and feed-forward run one after the other, not side by side"
    ),
    "opt": _Rule(
        keys=_LLAMA_KEYS | {"ffn": "ffn_dim"}, fixed={**_LAYERNORM, "positions": "learned"}, tied=True
    ),
}
_NOT_REPRESENTABLE = {
    "kv_lora_rank": "multi-head latent attention",
    "vision_config": "a vision tower",
    "text_config": "a text model inside another",
    "audio_config": "an audio tower",
    "encoder_layers": "an encoder",
    "ssm_cfg": "state-space layers",
    "state_size": "state-space layers",
    "quantization_config": "quantised weights",
}


def read_hf_config(config: Mapping[str, Any]) -> tuple[ModelShape, tuple[str, ...]]:
    """The shape that a Hugging Face `config.json` describes, and a sentence for everything defaulted or left out.

    Raises:
        WorkloadError: an architecture that a ModelShape cannot represent (which part is named), or a missing size.
    """
    kind = config.get("model_type")
    rule = _rule(config, kind)
    sizes = {key: _size(config, name, key, rule) for key, name in rule.keys.items()}
    notes = [f"{kind}: {rule.left_out}"] if rule.left_out else []
    if rule.fixed.get("positions") != "learned" and sizes["seq"] > DEFAULT_SEQ:
        notes.append(
            f"sequence length {DEFAULT_SEQ}, not the {sizes['seq']} positions that the config allows"
        )
        sizes["seq"] = DEFAULT_SEQ
    window = config.get("sliding_window")
    if config.get("use_sliding_window", True) and isinstance(window, int) and window < sizes["seq"]:
        notes.append(f"attention over the whole sequence, not in the config's window of {window} tokens")
    values: dict[str, Any] = {
        **sizes,
        "kv_heads": _kv_heads(config, sizes["heads"]),
        "head_dim": _optional(config, "head_dim"),
        "tied": bool(config.get("tie_word_embeddings", rule.tied)),
        "bias": bool(config.get("mlp_bias") and config.get("attention_bias")),
        **rule.fixed,
        **(_experts(config, rule) if rule.experts else {}),
    }
    if bool(config.get("mlp_bias")) != bool(config.get("attention_bias")):
        notes.append("biases of the attention or feed-forward projections alone are left out")
    name = str(config.get("_name_or_path") or kind).rstrip("/").rpartition("/")[2][:80]
    return ModelShape(name=name, **values).check(), tuple(notes)


def _rule(config: Mapping[str, Any], kind: Any) -> _Rule:
    for key, what in _NOT_REPRESENTABLE.items():
        if config.get(key):
            raise WorkloadError(
                f"the config describes {what} ({key}), which a decoder's shape does not represent",
                hint="capture a short run of the model instead",
            )
    if not isinstance(kind, str) or kind not in _MODEL_TYPES:
        near = get_close_matches(str(kind), _MODEL_TYPES, n=1)
        raise WorkloadError(
            f"model_type {str(kind)[:60]!r} is not one of {', '.join(_MODEL_TYPES)}",
            hint=f"did you mean {near[0]}?"
            if near
            else "capture a short run of the model, or type its sizes with --model",
        )
    if config.get("add_cross_attention") or config.get("is_encoder_decoder"):
        raise WorkloadError(
            "the config describes cross-attention, which a decoder's shape does not represent",
            hint="capture a short run of the model instead",
        )
    return _MODEL_TYPES[kind]


def _size(config: Mapping[str, Any], name: str, key: str, rule: _Rule) -> int:
    value = config.get(name)
    if value is None and name == "n_inner":
        return 4 * _size(config, rule.keys["hidden"], "hidden", rule)
    if isinstance(value, bool) or not isinstance(value, int):
        raise WorkloadError(
            f"the config gives {name}={str(value)[:60]}, but {key} is a whole number", hint=f"set {name}"
        )
    return value


def _optional(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise WorkloadError(
            f"the config gives {name}={str(value)[:60]}, not a whole number",
            hint=f"set {name}, or leave it out",
        )
    return value


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("model_type") == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else heads
    return _optional(config, "num_key_value_heads") or heads


def _experts(config: Mapping[str, Any], rule: _Rule) -> dict[str, int]:
    assert rule.experts, "called for mixtures of experts only"
    experts, topk, width = (_size(config, name, name, rule) for name in rule.experts)
    every = _optional(config, "decoder_sparse_step") or _optional(config, "moe_layer_freq") or 1
    dense = sorted(_dense_layers(config))
    if every != 1 or dense != list(range(len(dense))):
        raise WorkloadError(
            f"experts in every {every}. layer but {dense}: a decoder's shape has dense layers at its start only",
            hint="capture a short run of the model instead",
        )
    shared = _optional(config, "shared_expert_intermediate_size") or width * _optional(
        config, "n_shared_experts"
    )
    return {
        "experts": experts,
        "topk": topk,
        "expert_ffn": width,
        "shared_ffn": shared,
        "dense_layers": len(dense),
    }


def _dense_layers(config: Mapping[str, Any]) -> Iterator[int]:
    yield from range(_optional(config, "first_k_dense_replace"))
    listed = config.get("mlp_only_layers") or []
    yield from (n for n in (listed if isinstance(listed, list) else []) if isinstance(n, int))
