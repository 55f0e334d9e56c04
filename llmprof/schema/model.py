"""The shape of a decoder: the few integers from which a Workload is built without a trace of the user's own model.

A shape is typed as `FAMILY:key=value,...` (`parse_model`); `llmprof.schema.hf_config` reads it from a `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import msgspec

from llmprof.errors import WorkloadError

NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rope", "learned", "alibi", "none")
LIMITS = {
    "layers": 9_000, "hidden": 1_000_000, "ffn": 10_000_000, "heads": 100_000, "kv_heads": 100_000,
    "head_dim": 100_000, "vocab": 100_000_000, "seq": 100_000_000, "experts": 100_000, "topk": 100_000,
    "expert_ffn": 10_000_000, "shared_ffn": 10_000_000, "dense_layers": 9_000,
}  # fmt: skip
"""Largest value of each size: far above any model, and small enough that products of sizes stay exact."""
_REQUIRED = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer.

    Attributes:
        name: for people.
        layers: number of blocks.
        hidden: width of the residual stream.
        ffn: width of one up projection of a dense feed-forward.
        heads, kv_heads: query heads, and key-and-value heads (fewer in grouped-query attention).
        head_dim: width of one head; 0 means hidden / heads.
        vocab: rows of the embedding, as trained.
        seq: tokens in a sequence (default of a request; rows of a learned position table).
        gated: the feed-forward multiplies two up projections (SwiGLU) instead of one with GELU.
        tied: the head shares the embedding's matrix.
        bias: linear layers have biases.
        norm: one of NORMS.
        positions: one of POSITIONS.
        causal: attention looks back only.
        experts: routed experts in each mixture-of-experts block; 0 for a dense model.
        topk: routed experts that each token visits.
        expert_ffn: width of one up projection of a routed expert; 0 means `ffn`.
        shared_ffn: width of one up projection of the shared expert; 0 for none.
        dense_layers: leading blocks that are dense although `experts` is set.
    """

    name: str = ""
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 0
    vocab: int
    seq: int = 2048
    gated: bool = True
    tied: bool = False
    bias: bool = False
    norm: str = "rmsnorm"
    positions: str = "rope"
    causal: bool = True
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0

    @property
    def head_width(self) -> int:
        """Width of one head: `head_dim`, else hidden / heads."""
        return self.head_dim or self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Elements of all parameters before any sharding: norms and biases counted, a tied head once."""
        return self._count(self.experts)

    @property
    def active_parameters(self) -> int:
        """Elements of the parameters that one token meets: of the routed experts, `topk`."""
        return self._count(self.topk)

    def _count(self, experts: int) -> int:
        norm = self.hidden * (2 if self.norm == "layernorm" else 1)
        sparse = self.layers - self.dense_layers if self.experts else 0
        routed = self._feed_forward(self.expert_ffn or self.ffn)
        shared = self._feed_forward(self.shared_ffn) if self.shared_ffn else 0
        return (
            self.vocab * self.hidden * (1 if self.tied else 2)
            + (self.seq * self.hidden if self.positions == "learned" else 0)
            + self.layers * (self._attention() + 2 * norm)
            + (self.layers - sparse) * self._feed_forward(self.ffn)
            + sparse * (self.hidden * self.experts + experts * routed + shared)
            + norm
        )

    def _attention(self) -> int:
        query, key_value = self.heads * self.head_width, 2 * self.kv_heads * self.head_width
        weights = self.hidden * (2 * query + key_value)
        return weights + (query + key_value + self.hidden if self.bias else 0)

    def _feed_forward(self, width: int) -> int:
        ups = 2 if self.gated else 1
        return self.hidden * width * (ups + 1) + (ups * width + self.hidden if self.bias else 0)

    def check(self) -> ModelShape:
        """The shape itself, when it is one that can exist.

        Raises:
            WorkloadError: with the first size that breaks a rule, and the rule with its numbers.
        """
        problem = next(_problems(self), None)
        if problem:
            raise WorkloadError(
                f"model {self.name}: {problem[0]}".replace("model :", "model:"), hint=problem[1]
            )
        return self


def _problems(shape: ModelShape) -> Iterator[tuple[str, str]]:
    for key, most in LIMITS.items():
        value, least = getattr(shape, key), 1 if key in _REQUIRED else 0
        if not least <= value <= most:
            yield (
                f"{key}={value} is not between {least} and {most}",
                f"give {key} as a whole number in that range",
            )
    for key, value, choices in (("norm", shape.norm, NORMS), ("positions", shape.positions, POSITIONS)):
        if value not in choices:
            yield f"{key}={value} is not one of {', '.join(choices)}", _closest(value, choices)
    if not shape.head_dim and shape.hidden % shape.heads:
        near = min(
            (n for n in range(1, shape.hidden + 1) if shape.hidden % n == 0),
            key=lambda n: abs(n - shape.heads),
        )
        yield (
            f"hidden={shape.hidden} is not a multiple of heads={shape.heads}",
            f"set heads={near}, or give head_dim",
        )
    if shape.heads % shape.kv_heads:
        yield (
            f"heads={shape.heads} is not a multiple of kv_heads={shape.kv_heads}",
            "set kv_heads to a divisor of heads: each key-and-value head serves as many query heads",
        )
    yield from _expert_problems(shape)


def _expert_problems(shape: ModelShape) -> Iterator[tuple[str, str]]:
    if shape.experts and not 1 <= shape.topk <= shape.experts:
        yield (
            f"topk={shape.topk} of experts={shape.experts}: each token visits between 1 and all of the experts",
            f"set topk between 1 and {shape.experts}",
        )
    for key in ("topk", "expert_ffn", "shared_ffn", "dense_layers"):
        if getattr(shape, key) and not shape.experts:
            yield (
                f"{key}={getattr(shape, key)} needs experts, but experts=0",
                f"give experts, or leave {key} out",
            )
    if shape.dense_layers > shape.layers:
        yield (
            f"dense_layers={shape.dense_layers} of layers={shape.layers}: at most all blocks are dense",
            f"set dense_layers={shape.layers} or less",
        )


_LLAMA: dict[str, Any] = {"vocab": 32000, "seq": 4096}
_GPT: dict[str, Any] = {
    "vocab": 50257, "seq": 2048, "gated": False, "tied": True, "bias": True, "norm": "layernorm",
    "positions": "learned",
}  # fmt: skip
_EXPERTS: dict[str, Any] = {**_LLAMA, "experts": 8, "topk": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen": {**_LLAMA, "vocab": 151936},
    "gpt": _GPT,
    "mixtral": _EXPERTS,
    "moe": _EXPERTS,
}
"""What a family says where nothing is typed, beside the struct's own defaults (gated, RMSNorm, rope, untied, no bias)."""
_KEYS = tuple(field for field in ModelShape.__struct_fields__ if field != "name")
_SWITCHES = ("gated", "tied", "bias", "causal")
_WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_EXAMPLE = "llama:layers=32,hidden=4096,ffn=11008,heads=32,kv_heads=32,vocab=32000,seq=4096"


class ParsedModel(NamedTuple):
    """A shape and the sizes that its family gave because they were not typed.

    Attributes:
        assumption: one sentence that lists them, "" when all were typed.
    """

    shape: ModelShape
    assumption: str


def parse_model(text: str) -> ModelShape:
    """The shape typed as `FAMILY:key=value,...`; what is left out is the family's default.

    Raises:
        WorkloadError: an unknown family or key, a value of the wrong kind, or sizes that contradict each other.
    """
    return read_model(text).shape


def read_model(text: str) -> ParsedModel:
    """As `parse_model`, with a sentence about what was not typed.

    Raises:
        WorkloadError: as `parse_model`.
    """
    family, colon, body = text.strip().partition(":")
    family = family.strip().lower()
    if family not in FAMILIES:
        names = ", ".join(FAMILIES)
        raise WorkloadError(
            f"model family {family[:60]!r} is not one of {names} (names of models are not looked up)",
            hint=_closest(family, FAMILIES)
            if get_close_matches(family, FAMILIES)
            else f"for example {_EXAMPLE}",
        )
    typed = _typed(body, text)
    missing = [key for key in ("layers", "hidden", "heads") if key not in typed]
    if missing or not colon:
        raise WorkloadError(
            f"model {text[:80]!r} does not give {', '.join(missing)}", hint=f"for example {_EXAMPLE}"
        )
    values = FAMILIES[family] | typed
    values.setdefault("kv_heads", values["heads"])
    values.setdefault(
        "ffn", 4 * values["hidden"] if not values.get("gated", True) else _swiglu_width(values["hidden"])
    )
    shape = ModelShape(name=family, **values).check()
    shape = msgspec.structs.replace(shape, name=f"{family} {_short(shape.parameters)}")
    defaults = [f"{key}={values[key]}" for key in _REQUIRED if key not in typed]
    defaults += [f"{key}={values[key]}" for key in ("experts", "topk") if key in values and key not in typed]
    return ParsedModel(shape, f"defaults of family {family}: {', '.join(defaults)}" if defaults else "")


def shape_from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face `config.json` describes; `llmprof.schema.hf_config` also tells what it leaves out.

    Raises:
        WorkloadError: an architecture that a ModelShape cannot represent, or a missing size.
    """
    from llmprof.schema.hf_config import read_hf_config

    return read_hf_config(config)[0]


def _typed(body: str, text: str) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in body.split(","))):
        key, _, value = (p.strip() for p in part.partition("="))
        if key not in _KEYS:
            raise WorkloadError(
                f"model key {key[:60]!r} is not one of {', '.join(_KEYS)}", hint=_closest(key, _KEYS)
            )
        if key in typed:
            raise WorkloadError(f"{key} is given twice in {text[:80]!r}", hint=f"give {key} once")
        typed[key] = _value(key, value)
    return typed


def _value(key: str, value: str) -> int | bool | str:
    if key in ("norm", "positions"):
        return value.lower()
    if key in _SWITCHES:
        if value.lower() not in _WORDS:
            raise WorkloadError(f"{key}={value[:60]} is neither 0 nor 1", hint=f"write {key}=0 or {key}=1")
        return _WORDS[value.lower()]
    if not (value.isascii() and value.isdigit() and len(value) <= 12):
        raise WorkloadError(
            f"{key}={value[:60]} is not a whole number between 1 and {LIMITS[key]}",
            hint=f"write it in digits, such as {key}=32",
        )
    return int(value)


def _closest(name: str, known: Any) -> str:
    near = get_close_matches(name.lower(), list(known), n=2, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(known)}"


def _swiglu_width(hidden: int) -> int:
    """Llama's rule: two thirds of 4 x hidden, rounded up to a multiple of 256."""
    return -(-(8 * hidden // 3) // 256) * 256


def _short(number: int) -> str:
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= scale:
            return f"{number / scale:.3g}{suffix}"
    return str(number)
