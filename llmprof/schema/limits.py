"""What a workload of a file must keep to before anything is computed from it: names that exist, numbers in range."""

from __future__ import annotations

from collections.abc import Iterator

from llmprof.errors import WorkloadError
from llmprof.schema.workload import ClassTrace, Dim, LayerTrace, TensorSpec, Workload

MAX_LAYERS = 10_000
"""Layers of a sequence, repetitions counted."""
MAX_COUNT = 10**9
"""Equal calls in a row, sequences, tokens, microbatches."""
MAX_DIM = 10**12
"""A dimension of a tensor, or a coefficient of one."""
MAX_SLOTS = 100
"""State tensors for each parameter."""
AXES = ("dp", "tp", "pp")
LAYER_KINDS = ("prologue", "block", "epilogue", "loss")


def check_workload(workload: Workload, where: str) -> None:
    """Check that names refer to something and that numbers are in range.

    Args:
        workload: what was read.
        where: the file it came from, for the message.

    Raises:
        WorkloadError: with the first thing that is wrong.
    """
    problem = next(_problems(workload), None)
    if problem:
        raise WorkloadError(f"{where} contradicts itself: {problem}", hint="capture the run again")


def _problems(workload: Workload) -> Iterator[str]:
    for key in ("batch", "seq", "accum", "dp"):
        yield from _outside(key, getattr(workload, key), 1, MAX_COUNT)
    yield from _outside("optimizer.state_slots", workload.optimizer.state_slots, 0, MAX_SLOTS)
    yield from _layer_problems(workload)
    yield from _sequence_problems(workload)
    for trace in workload.classes:
        yield from _class_problems(workload, trace)


def _layer_problems(workload: Workload) -> Iterator[str]:
    names = [spec.name for spec in workload.layers]
    if len(set(names)) < len(names):
        yield f"two of its {len(names)} layers have one name"
    for spec in workload.layers:
        if spec.kind not in LAYER_KINDS:
            yield f"layer {spec.name!r} has kind {spec.kind!r}, not one of {', '.join(LAYER_KINDS)}"
        for parameter in spec.parameters:
            for size in parameter.shape:
                yield from _outside(f"a dimension of {spec.name}.{parameter.name}", size, 0, MAX_DIM)


def _sequence_problems(workload: Workload) -> Iterator[str]:
    known = {spec.name for spec in workload.layers}
    for name, count in workload.sequence:
        if name not in known:
            yield f"its sequence names the layer {name!r}, but its layers are {', '.join(sorted(known)) or 'none'}"
        yield from _outside(f"the count of {name!r}", count, 1, MAX_LAYERS)
    yield from _outside("the number of layers", sum(n for _, n in workload.sequence), 0, MAX_LAYERS)


def _class_problems(workload: Workload, trace: ClassTrace) -> Iterator[str]:
    where = f"class tp={trace.tp}{' sp=1' if trace.sp else ''}"
    yield from _outside(f"tp of {where}", trace.tp, 1, MAX_COUNT)
    if not 0 <= trace.replicated_flops_fraction <= 1:
        yield f"{where} has replicated_flops_fraction={trace.replicated_flops_fraction:g}, not between 0 and 1"
    parameters = {spec.name: len(spec.parameters) for spec in workload.layers}
    for name, _ in workload.sequence:
        if name not in trace.layers:
            yield f"{where} has no trace of layer {name!r}"
            continue
        layer = trace.layers[name]
        if layer.parameters and len(layer.parameters) != parameters[name]:
            yield f"{where} has {len(layer.parameters)} parameters in layer {name!r}, which has {parameters[name]}"
        yield from _trace_problems(layer, f"{where}, layer {name!r}")


def _trace_problems(layer: LayerTrace, where: str) -> Iterator[str]:
    for op in layer.ops:
        yield from _outside(f"{where}: count of {op.op!r}", op.count, 1, MAX_COUNT)
        if op.collective and op.axis not in AXES:
            yield f"{where}: {op.op!r} is a collective over {op.axis!r}, not over one of {', '.join(AXES)}"
        for tensor in (*op.inputs, *op.outputs):
            yield from _dim_problems(tensor, f"{where}: a dimension of {op.op!r}")
    for tensor in (*layer.saved, *((layer.boundary,) if layer.boundary else ())):
        yield from _dim_problems(tensor, f"{where}: a dimension of an activation")
    for shape in layer.parameters:
        for size in shape:
            yield from _outside(f"{where}: a dimension of a parameter", size, 0, MAX_DIM)


def _dim_problems(tensor: TensorSpec, where: str) -> Iterator[str]:
    if not all(map(_is_possible, tensor.dims)):
        yield f"{where} is not between 0 and {MAX_DIM:.0e}: {tensor.dims}"


def _is_possible(dim: Dim) -> bool:
    if isinstance(dim, int):
        return 0 <= dim <= MAX_DIM
    coefficients = (dim.c, dim.cb, dim.cs, dim.cbs, dim.css, dim.cbss)
    return 1 <= dim.div <= MAX_COUNT and all(abs(c) <= MAX_DIM for c in coefficients)


def _outside(what: str, value: int, least: int, most: int) -> Iterator[str]:
    if not least <= value <= most:
        yield f"{what} is {value}, not between {least} and {most}"
