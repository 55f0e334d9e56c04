"""The shape cells of a row of published runs become a ModelShape, with a sentence for each size that was derived."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from llmprof.errors import WorkloadError
from llmprof.judge.cells import Reject, Row, flag, positive, required, text, whole
from llmprof.schema.model import ModelShape

_GATED: tuple[dict[str, Any], ...] = (
    {"norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False},
    {"norm": "rmsnorm", "positions": "rope", "bias": False, "tied": True},
)
_PLAIN: tuple[dict[str, Any], ...] = (
    {"norm": "layernorm", "positions": "learned", "bias": True, "tied": True},
    {"norm": "layernorm", "positions": "learned", "bias": False, "tied": True},
    {"norm": "layernorm", "positions": "learned", "bias": True, "tied": False},
    {"norm": "layernorm", "positions": "rope", "bias": False, "tied": True},
    {"norm": "layernorm", "positions": "rope", "bias": False, "tied": False},
)
"""What a table does not say: styles of decoders with a gated feed-forward (llama) and without (GPT), usual one first."""
_CLEARLY_BETTER = 0.005
"""Share of the parameters by which a less usual style must come closer to the reported count to be chosen: counts are
reported with three digits."""
_WIDTH_STEP = 64
_EXPERT_TOLERANCE = 0.05


class Shape(NamedTuple):
    """A shape and what was assumed to make it."""

    shape: ModelShape
    notes: tuple[str, ...]


def read_shape(row: Row, *, seq: int, causal: bool = True) -> Shape:
    """The decoder of a row.

    Sizes that are not stated are derived: key-and-value heads are the query heads, a feed-forward width follows from
    the reported parameters; whether the head is tied, and linear layers have biases, is what reproduces them best.

    Raises:
        Reject: a size is missing and cannot be derived, or the sizes contradict each other.
    """
    notes: list[str] = []
    sizes = {key: required(row, column) for key, column in _REQUIRED.items()}
    kv_heads = whole(row, "kv_heads")
    if kv_heads is None:
        kv_heads = sizes["heads"]
        notes.append(f"kv_heads={kv_heads}: not stated, as heads")
    elif sizes["heads"] % kv_heads:
        raise Reject(f"sizes contradict each other: heads is not a multiple of kv_heads={kv_heads}")
    gated = flag(row, "gated_mlp")
    if gated is None:
        raise Reject("empty cell: gated_mlp")
    common = {
        **sizes,
        "kv_heads": kv_heads,
        "gated": gated,
        "causal": causal,
        "seq": seq,
        "name": text(row, "model"),
    }
    candidates = [_complete(row, {**common, **style}) for style in (_GATED if gated else _PLAIN)]
    shape, note = _closest(candidates, positive(row, "params_B"))
    notes += [n for n in (_derived_width(row, shape), note) if n]
    try:
        return Shape(shape.check(), tuple(notes))
    except WorkloadError as error:
        raise Reject(f"sizes contradict each other: {error.message.partition(': ')[2]}") from error


_REQUIRED = {"layers": "layers", "hidden": "hidden", "heads": "heads", "vocab": "vocab"}


def _complete(row: Row, known: dict[str, Any]) -> ModelShape:
    """The shape with the widths of its feed-forwards."""
    stated, params = whole(row, "ffn_hidden"), positive(row, "params_B")
    experts = whole(row, "n_experts") or 0
    known = known | {"experts": experts, "topk": (whole(row, "topk") or 1) if experts else 0}
    shape = ModelShape(ffn=stated or 1, **known)
    if params is None:
        if stated is None:
            raise Reject("empty cell: ffn_hidden")
        return shape
    if experts:
        fits = stated and abs(shape.parameters - params * 1e9) <= _EXPERT_TOLERANCE * params * 1e9
        return shape if fits else msgspec.structs.replace(shape, expert_ffn=_width(shape, params, experts))
    return shape if stated else msgspec.structs.replace(shape, ffn=_width(shape, params, 1))


def _width(shape: ModelShape, params_billions: float, copies: int) -> int:
    """The width of one up projection (elements) that gives the reported number of parameters."""
    narrow = (
        msgspec.structs.replace(shape, expert_ffn=1)
        if shape.experts
        else msgspec.structs.replace(shape, ffn=1)
    )
    missing = params_billions * 1e9 - narrow.parameters
    each = shape.layers * copies * shape.hidden * (3 if shape.gated else 2)
    return max(_WIDTH_STEP, round((missing / each + 1) / _WIDTH_STEP) * _WIDTH_STEP)


def _closest(candidates: list[ModelShape], params_billions: float | None) -> tuple[ModelShape, str]:
    """The first candidate, unless another comes clearly closer to the reported parameters."""
    best = candidates[0]
    if params_billions is None:
        return best, f"{_style(best)}: not stated, as usual for such a feed-forward"
    wanted = params_billions * 1e9

    def miss(shape: ModelShape) -> float:
        return abs(shape.parameters - wanted) / wanted

    for candidate in candidates[1:]:
        if miss(candidate) < miss(best) - _CLEARLY_BETTER:
            best = candidate
    return best, f"{_style(best)}: what comes closest to the reported parameters"


def _style(shape: ModelShape) -> str:
    words: Iterator[str] = iter((
        shape.norm, f"positions {shape.positions}",
        "biases" if shape.bias else "no biases", "tied head" if shape.tied else "untied head",
    ))  # fmt: skip
    return ", ".join(words)


def _derived_width(row: Row, shape: ModelShape) -> str:
    if shape.expert_ffn:
        return f"width of an expert {shape.expert_ffn}: from params_B"
    return "" if text(row, "ffn_hidden") else f"ffn_hidden={shape.ffn}: not stated, from params_B"
