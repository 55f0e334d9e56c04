"""An operator with its shapes -> the overload and arguments that give the recorded results, and fresh tensors for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, islice, product
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from llmprof.hooks.fake import fake_mode, quiet
from llmprof.hooks.measure_rules import (
    SCALAR_FIRST,
    Argument,
    NoRule,
    as_dtype,
    index_limit,
    plain_options,
    transposed,
)
from llmprof.hooks.measure_values import Values
from llmprof.schema.measurements import OpCall
from llmprof.schema.operators import Tensor, collective_kind, family, split_name

_MOST_TRIES = 400
Slot = Tensor | list[Tensor]


class CannotRebuild(Exception):
    """An operator cannot be run from what its row says; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A tensor that will be made.

    Attributes:
        limit: an index holds whole numbers below it; 0 for values that do not matter.
        swapped: it is a transposed view of what lies in memory.
    """

    tensor: Tensor
    limit: int = 0
    swapped: bool = False


class Rebuilt(NamedTuple):
    """A call that can be run.

    Attributes:
        run: the overload.
        names: of the positional arguments.
        args, kwargs: with a Blueprint for each tensor.
    """

    run: Callable[..., Any]
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    forward: Callable[..., Any] | None

    def make(self, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments on new tensors; those of an attention backward come from its forward."""
        args, kwargs = pytree.tree_map_only(Blueprint, values.tensor, (self.args, self.kwargs))
        if self.forward is not None:
            args = _after_forward(self, args, kwargs)
        return tuple(args), kwargs


def rebuild(call: OpCall, device: str) -> Rebuilt:
    """The first overload and arguments that give the recorded results.

    Args:
        device: "cpu" or "cuda".

    Raises:
        CannotRebuild: with the reason.
    """
    if collective_kind(call.op):
        raise CannotRebuild("it is a collective: --collectives measures those")
    if not call.inputs:
        raise CannotRebuild("its row has no tensor with a shape")
    unknown = next((t.dtype for t in (*call.inputs, *call.outputs) if as_dtype(t.dtype) is None), "")
    if unknown:
        raise CannotRebuild(f"torch has no dtype {unknown}")
    reasons: list[str] = []
    for function in _overloads(call.op):
        try:
            for candidate in islice(_candidates(function, call), _MOST_TRIES):
                reason = _check(candidate, call, device)
                if not reason:
                    return candidate
                reasons.append(reason)
        except NoRule as error:
            reasons.append(str(error))
    raise CannotRebuild(next(iter(reasons), "its tensors fit no overload"))


def _overloads(op: str) -> list[Any]:
    """Overloads without an output argument, the plain one first."""
    namespace, name = split_name(op)
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
    except (AttributeError, RuntimeError) as error:
        raise CannotRebuild(f"torch has no operator {op}") from error
    first = "Scalar" if name.rstrip("_") in SCALAR_FIRST else "Tensor"
    names = sorted(packet.overloads(), key=lambda n: (n != "default", not n.endswith(first)))
    found = [getattr(packet, n) for n in names if not n.endswith("hacked_twin")]
    return [f for f in found if not any(a.is_out for a in f._schema.arguments)]


def _slots(inputs: Sequence[Tensor]) -> list[Slot]:
    """Tensors and lists of tensors as the operator takes them."""
    slots: list[Slot] = []
    for group, members in groupby(inputs, key=lambda t: t.group):
        held = list(members)
        slots += [held] if group else held
    return slots


def _candidates(function: Any, call: OpCall) -> Iterator[Rebuilt]:
    """Every way to call an overload with these tensors, the likeliest first.

    Raises:
        NoRule: an argument has no value.
    """
    arguments = [Argument.of(a) for a in function._schema.arguments]
    places = [i for i, a in enumerate(arguments) if a.holds_tensors]
    plain = [i for i, a in enumerate(arguments) if not a.holds_tensors]
    slots = _slots(call.inputs)
    for chosen in _placements(arguments, places, slots):
        held = dict(zip(chosen, slots, strict=True))
        values: dict[int, Any] = {i: held[i] if i in held else _missing(arguments[i], call) for i in places}
        for options in product(*(plain_options(arguments[i], call) for i in plain)):
            with contextlib.suppress(IndexError):  # an index into a tensor without that dimension
                yield _assemble(function, arguments, call, values | dict(zip(plain, options, strict=True)))


def _placements(
    arguments: Sequence[Argument], places: Sequence[int], slots: Sequence[Slot]
) -> list[tuple[int, ...]]:
    """Arguments that the recorded tensors can be, in order; those that leave the fewest required ones out come first."""

    def fits(chosen: tuple[int, ...]) -> bool:
        return all(
            (arguments[i].bare == "List[Tensor]") == isinstance(slot, list)
            and "Optional[Tensor]]" not in arguments[i].kind
            for i, slot in zip(chosen, slots, strict=True)
        )

    def left_out(chosen: tuple[int, ...]) -> int:
        return sum(not arguments[i].optional for i in places if i not in chosen)

    return sorted(filter(fits, combinations(places, len(slots))), key=left_out)


def _missing(argument: Argument, call: OpCall) -> Any:
    """A tensor argument that no recorded shape is for: none, or a 0-dim tensor, which rows leave out.

    Raises:
        NoRule: a list of indices, which torch does not record.
    """
    if argument.optional:
        return None
    if argument.bare == "List[Optional[Tensor]]":
        raise NoRule("torch does not record the indices that it takes")
    if argument.bare == "List[Tensor]":
        lists = [s for s in _slots(call.inputs) if isinstance(s, list)]
        steps = argument.name == "state_steps" and bool(lists)
        return [Tensor((), "float32")] * len(lists[0]) if steps else []
    return Tensor((), call.inputs[0].dtype)


def _assemble(function: Any, arguments: Sequence[Argument], call: OpCall, values: dict[int, Any]) -> Rebuilt:
    named = {a.name: values[i] for i, a in enumerate(arguments)}

    def blueprint(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            limit = index_limit(call, name, named)
            if limit is None:
                raise NoRule(f"no rule says what the whole numbers of its argument {name!r} point to")
            return Blueprint(value, limit, transposed(call, name) and len(value.shape) > 1)
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [Blueprint(member) for member in value]
        return value

    made = {name: blueprint(name, value) for name, value in named.items()}
    positional = [a.name for a in arguments if not a.keyword]
    return Rebuilt(
        run=function,
        names=tuple(positional),
        args=tuple(made[n] for n in positional),
        kwargs={a.name: made[a.name] for a in arguments if a.keyword},
        forward=_forward_of(call.op),
    )


def _check(candidate: Rebuilt, call: OpCall, device: str) -> str:
    """Why a candidate is not what ran, "" when it gives the recorded results; runs no kernel."""
    try:
        with fake_mode(), quiet(), torch.no_grad():
            args, kwargs = candidate.make(Values(device))
            out = candidate.run(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 (whatever torch says: this candidate is not it)
        return f"torch refuses its arguments: {first_line(error)}"
    found = [(tuple(t.shape), str(t.dtype)) for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    wanted = [(t.shape, f"torch.{t.dtype}") for t in call.outputs]
    if wanted and found != wanted:
        return f"no arguments give the recorded results {_text(wanted)}, but {_text(found)}"
    return ""


def _text(tensors: Sequence[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "a number" for shape, _ in tensors[:4]) or "nothing"


def first_line(error: BaseException) -> str:
    """Kind and first line of an error, short."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _forward_of(op: str) -> Callable[..., Any] | None:
    """The forward operator of an attention backward, whose statistics must be true ones."""
    namespace, name = split_name(op)
    if family(op) != "attention" or not name.endswith("_backward"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_backward"), None)
    return None if packet is None else packet.default


_FORWARD_NAMES = {
    "out": ("output", "out"),
    "logsumexp": ("logsumexp", "log_sumexp"),
    "philox_seed": ("philox_seed", "rng_state"),
    "philox_offset": ("philox_offset", "unused"),
}
"""Where an argument of the backward is found among the results of the forward; others have the same name in both."""


def _after_forward(call: Rebuilt, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments with the forward's results in the places of what it gives."""
    given = {**dict(zip(call.names, args, strict=True)), **kwargs}
    schema: Any = call.forward._schema  # type: ignore[union-attr]
    wanted = [Argument.of(a) for a in schema.arguments]
    inputs = {a.name: given[a.name] for a in wanted if a.name in given}
    inputs |= {"compute_log_sumexp": True} if any(a.name == "compute_log_sumexp" for a in wanted) else {}
    results = call.forward(**inputs)  # type: ignore[misc]
    by_name = {r.name: value for r, value in zip(schema.returns, results, strict=True)}
    found = []
    for name, value in zip(call.names, args, strict=True):
        sources = [by_name[n] for n in _FORWARD_NAMES.get(name, (name,)) if n in by_name]
        found.append(sources[0] if sources else value)
    return found
