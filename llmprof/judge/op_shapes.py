"""The `shape` cell of an operator table becomes the sizes that it states: a matrix, fields, traced tensors, a block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_COUNT = r"[1-9]\d{0,14}"
"""A whole number that a float holds exactly."""
_MATRIX = re.compile(rf"({_COUNT})x({_COUNT})( gated \(silu\*mul\))?")
_VOCABULARY = re.compile(rf"vocab ({_COUNT})/({_COUNT})")
_BLOCK = re.compile(rf"one (\S+) block, batch ({_COUNT}) x seq ({_COUNT}), hidden ({_COUNT}), ffn ({_COUNT})")
_FIELD = re.compile(rf"(\w+)=({_COUNT}|\d\.\d+e\+\d\d)|(head_dim|width|vocabulary slice) ({_COUNT})")
_STAGE = re.compile(r"(first|middle|last) pipeline stage")
_DIMS = rf"{_COUNT}(?:, {_COUNT}){{0,7}}"
_TRACED = re.compile(rf"\[((?:\[{_DIMS}\](?:, )?)*)\]->\(({_DIMS}),?\)")


class Matrix(NamedTuple):
    """ROWSxCOLUMNS of the output; `gated` reads twice the columns."""

    rows: int
    columns: int
    gated: bool


class Vocabulary(NamedTuple):
    """Rows of an embedding table, and how many devices share them."""

    rows: int
    parts: int


class Block(NamedTuple):
    """One block of a published transformer; `ffn` is the width of its one up projection."""

    model: str
    batch: int
    seq: int
    hidden: int
    ffn: int


class Traced(NamedTuple):
    """Shapes of the input tensors, without scalars, and of the output."""

    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]


class Fields(NamedTuple):
    """Sizes by key; `stage` is "first", "middle" or "last", "" for none."""

    sizes: Mapping[str, int]
    stage: str


ShapeCell = Matrix | Vocabulary | Block | Traced | Fields


def read_shape_cell(text: str) -> ShapeCell | None:
    """What a cell states, None when it follows none of the grammars (an empty one too)."""
    if found := _MATRIX.fullmatch(text):
        return Matrix(int(found[1]), int(found[2]), bool(found[3]))
    if found := _VOCABULARY.fullmatch(text):
        return Vocabulary(int(found[1]), int(found[2]))
    if found := _BLOCK.fullmatch(text):
        return Block(found[1], int(found[2]), int(found[3]), int(found[4]), int(found[5]))
    if found := _TRACED.fullmatch(text):
        inputs = (_dims(dims) for dims in re.findall(r"\[([^\]]*)\]", found[1]))
        return Traced(tuple(dims for dims in inputs if dims != (1,)), _dims(found[2]))
    return _fields(text)


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(", "))


def _fields(text: str) -> Fields | None:
    sizes: dict[str, int] = {}
    stage = ""
    for field in text.split("; "):
        if found := _STAGE.fullmatch(field):
            stage = found[1]
        elif found := _FIELD.fullmatch(field):
            sizes[found[1] or found[3]] = int(float(found[2] or found[4]))
        else:
            return None
    return Fields(sizes, stage)
