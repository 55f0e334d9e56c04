"""A twin under one class of degrees (tp, sp) becomes a ClassTrace: exact in batch and sequence, FLOPs conserved."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from llmprof.errors import WorkloadError
from llmprof.hooks.dataflow import Dataflow, trace_dataflow
from llmprof.hooks.fake import fake_world
from llmprof.hooks.fit import DimFit, Point
from llmprof.hooks.inputs import InputSizes, make_inputs
from llmprof.hooks.layers import FitError, fit_layer, merge_equal, raw_layers
from llmprof.hooks.optimizers import trace_optimizer
from llmprof.hooks.parameters import local_parameters_of, local_shapes
from llmprof.hooks.plan import COLUMN, TensorPlan, apply_plan, find_plan, indivisible
from llmprof.hooks.prepare import Base, Prepared, prepare, trace_at
from llmprof.hooks.record import TracedOp
from llmprof.hooks.tracer import PassTrace
from llmprof.schema.operators import flops
from llmprof.schema.workload import ClassTrace, LayerTrace, OpSpec, TensorSpec

if TYPE_CHECKING:
    from llmprof.hooks.workload import TraceRequest

MAX_REPLICATED_FRACTION = 0.05
"""Share of matmul FLOPs without a tensor-parallel plan above which a class is refused."""

_MAX_VARIANTS = 24

AttributePath = tuple[str, ...]
"""Name of an integer of a module, or of an object that it holds ("cfg", "n_heads")."""


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Traced classes, why others are missing, and what to tell the user."""

    classes: tuple[ClassTrace, ...]
    refusal: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """Points of one fit; `batch` and `seq` are set where the fit holds for one value only."""

    points: tuple[Point, ...]
    batch: int | None = None
    seq: int | None = None


def trace_class(
    request: TraceRequest,
    sizes: InputSizes,
    base: Base,
    prepared: Prepared,
    points: Sequence[Point],
    *,
    tp: int = 1,
    sp: bool = False,
) -> Classes:
    """Trace at the points and fit; where a size has no polynomial the class holds for fewer sizes, and a note says so.

    Raises:
        WorkloadError: not even the captured size can be traced.
    """
    shapes = local_shapes(prepared.module, base.placed)
    optimizer, notes = _optimizer_ops(request, base, prepared)
    reasons: list[str] = []
    degrees = f"tp={tp},sp={int(sp)}"
    for attempts in _attempts(points, (sizes.batch, sizes.seq)):
        try:
            classes = []
            for attempt in attempts:
                passes = [trace_at(prepared, request, sizes, p) for p in attempt.points]
                raws = [raw_layers(p, base.skeleton) for p in passes]
                fit = DimFit(attempt.points, divisors=(1, tp))
                layers = {}
                for name in raws[0]:
                    ops, saved, boundary = fit_layer(name, [raw[name] for raw in raws], fit)
                    layers[name] = LayerTrace(
                        ops=(*ops, *optimizer.get(name, ())),
                        saved=saved,
                        boundary=boundary,
                        parameters=shapes.get(name, ()),
                    )
                classes.append(
                    ClassTrace(
                        tp=tp,
                        sp=sp,
                        batch=attempt.batch,
                        seq=attempt.seq,
                        traced_at=attempt.points,
                        layers=layers,
                    )
                )
            return Classes(classes=tuple(classes), notes=(*notes, *_fit_notes(reasons, attempts, degrees)))
        except (FitError, WorkloadError) as error:
            reasons.append(str(error))
    raise WorkloadError(f"the trace of {degrees} does not hold at the captured size: {reasons[-1]}")


def _attempts(points: Sequence[Point], captured: Point) -> Iterator[tuple[_Attempt, ...]]:
    """Exact in all; all but batch 1, which gets its own; exact in the batch; the captured size alone."""
    yield (_Attempt(points=tuple(points)),)
    batch, seq = points[-1]
    if batch == 1:
        lengths = list(dict.fromkeys(s for _, s in points))
        ones = tuple((1, s) for s in lengths)
        yield (_Attempt(points=(*points[:-1], (4, seq))), _Attempt(points=ones, batch=1))
    yield (_Attempt(points=tuple((b, captured[1]) for b in (2, 3, 5, 4)), seq=captured[1]),)
    yield (_Attempt(points=(captured, captured), batch=captured[0], seq=captured[1]),)


def _fit_notes(reasons: Sequence[str], attempts: tuple[_Attempt, ...], degrees: str) -> tuple[str, ...]:
    """Nothing to say when every size is covered."""
    last = attempts[-1]
    if last.seq is None:
        return ()
    where = f"sequence length {last.seq}" + (f" and batch {last.batch}" if last.batch else "")
    return (f"The trace of {degrees} holds at {where} only: {reasons[-1]}.",)


def trace_tensor_parallel(
    request: TraceRequest, sizes: InputSizes, base: Base, points: Sequence[Point]
) -> Classes:
    """Every degree of the request, with and without sequence parallelism, that conserves FLOPs."""
    if not request.degrees:
        return Classes(classes=())
    with base.prepared.subject.mode:
        args, kwargs = make_inputs(request.args, request.kwargs, sizes, points[0])
    flow = trace_dataflow(base.prepared.subject, args, kwargs)
    plan = find_plan(base.prepared.module, flow, request.tp_plan)
    reference = trace_at(base.prepared, request, sizes, points[0])
    classes: list[ClassTrace] = []
    refused: dict[str, list[str]] = {}
    notes: list[str] = []
    known: list[tuple[AttributePath, ...]] = []
    for tp in request.degrees:
        for sp in (False, True) if sizes.has_tokens else (False,):
            search = _Search(request, sizes, base, flow=flow, plan=plan, tp=tp, sp=sp, known=known)
            try:
                found = search.run(points, reference)
            except WorkloadError as error:
                refused.setdefault(error.message, []).append(f"tp={tp}{',sp=1' if sp else ''}")
                continue
            classes.extend(found.classes)
            notes.extend(found.notes)
    refusal = "; ".join(f"{' and '.join(which)}: {why}" for why, which in refused.items())
    return Classes(classes=tuple(classes), refusal=refusal, notes=tuple(notes))


class _Search:
    """Finds a way to run the user's code on this rank's share, and traces it."""

    def __init__(
        self,
        request: TraceRequest,
        sizes: InputSizes,
        base: Base,
        *,
        flow: Dataflow,
        plan: TensorPlan,
        tp: int,
        sp: bool,
        known: list[tuple[AttributePath, ...]],
    ) -> None:
        self._known = known
        self._request, self._sizes, self._base = request, sizes, base
        self._flow, self._plan, self._tp, self._sp = flow, plan, tp, sp

    def run(self, points: Sequence[Point], reference: PassTrace) -> Classes:
        """The class.

        Raises:
            WorkloadError: no way conserves FLOPs; the reason names the modules.
        """
        if not self._plan.roles:
            raise WorkloadError("no projections that tensor parallelism could split were found")
        reason = indivisible(self._plan, self._flow, self._tp)
        if reason:
            raise WorkloadError(reason)
        first: WorkloadError | None = None
        with fake_world(0, self._tp):
            variants = integer_variants(self._base.prepared.module, self._plan, self._flow, self._tp)
            for variant in itertools.chain(tuple(self._known), variants):
                try:
                    prepared = prepare(
                        self._request, keep=self._base.keep, shard=partial(self._shard, variant)
                    )
                    trace = trace_at(prepared, self._request, self._sizes, points[0])
                    fraction, modules = replicated_share(reference, trace, self._tp)
                except WorkloadError as error:
                    first = first or error
                    continue
                if variant not in self._known:
                    self._known.append(variant)
                if fraction > MAX_REPLICATED_FRACTION:
                    raise WorkloadError(
                        f"{fraction:.0%} of the matmul FLOPs have no tensor-parallel plan "
                        f"(more than {MAX_REPLICATED_FRACTION:.0%}): {', '.join(modules[:6])}"
                    )
                found = trace_class(
                    self._request, self._sizes, self._base, prepared, points, tp=self._tp, sp=self._sp
                )
                classes = tuple(
                    msgspec.structs.replace(
                        c, replicated_flops_fraction=fraction, replicated_modules=tuple(modules)
                    )
                    for c in found.classes
                )
                return Classes(classes=classes, notes=found.notes)
        raise first or WorkloadError("no plan could be traced")

    def _shard(self, variant: Sequence[AttributePath], module: nn.Module) -> dict[str, str]:
        mesh = init_device_mesh("cpu", (self._tp,), mesh_dim_names=("tp",))
        divide_integers(module, self._plan, variant, self._tp)
        apply_plan(module, mesh, self._plan, self._flow, sp=self._sp)
        return {mesh.get_group("tp").group_name: "tp"}


def replicated_share(whole: PassTrace, local: PassTrace, tp: int) -> tuple[float, list[str]]:
    """Share of matmul FLOPs that every rank repeats, and the modules that do.

    Raises:
        WorkloadError: a module lost or invented FLOPs.
    """
    before, after = _module_flops(whole), _module_flops(local)
    total = sum(before.values())
    if set(before) != set(after):
        odd = min(set(before) ^ set(after))
        raise WorkloadError(f"module {odd!r} has matmuls only with or only without tensor parallelism")
    repeated, modules = 0.0, []
    for name, f in before.items():
        # a share r is replicated, the rest divided: after = f (1 - r) / tp + f r
        share = (after[name] / f - 1 / tp) / (1 - 1 / tp)
        if share < -1e-9 or share > 1 + 1e-9:
            raise WorkloadError(
                f"module {name!r} does {after[name]} matmul FLOPs on each of {tp} ranks instead of {f} / {tp}"
            )
        repeated += max(share, 0.0) * f
        if share > 1e-9:
            modules.append(name)
    return (repeated / total if total else 0.0), modules


def _module_flops(trace: PassTrace) -> dict[str, int]:
    found: dict[str, int] = {}
    for op in trace.ops:
        work = flops(op.op, [t for t in op.inputs if t.shape], op.outputs, frozenset(op.attributes))
        if work:
            found[op.module] = found.get(op.module, 0) + work
    return found


def _holders(plan: TensorPlan) -> list[str]:
    """Modules that hold column-parallel projections directly."""
    return list(dict.fromkeys(n.rpartition(".")[0] for n, role in plan.roles.items() if role == COLUMN))


def integer_variants(
    root: nn.Module, plan: TensorPlan, flow: Dataflow, tp: int
) -> Iterator[tuple[AttributePath, ...]]:
    """Sets of integers to divide by the degree: none, all head counts, these and widths, then parts of them."""
    heads: dict[AttributePath, None] = {}
    widths: dict[AttributePath, None] = {}
    for name in _holders(plan):
        features = {
            use.out_features
            for use in flow.linears.values()
            if plan.roles.get(use.name) == COLUMN and use.name.rpartition(".")[0] == name
        }
        dims = {d for holder, (_, d) in flow.heads.items() if holder == name or holder.startswith(f"{name}.")}
        counts = {f // d for f in features for d in dims if d and f % d == 0}
        for path, value in _integers(root.get_submodule(name)):
            if value in counts and value % tp == 0:
                heads[path] = None
            elif value in features and path[-1] not in ("in_features", "out_features"):
                widths[path] = None
    tried: set[frozenset[AttributePath]] = set()
    every = (*heads, *widths)
    parts = (p for size in range(len(every), 0, -1) for p in itertools.combinations(every, size))
    for paths in itertools.islice(itertools.chain([(), tuple(heads), every], parts), _MAX_VARIANTS):
        if frozenset(paths) not in tried:
            tried.add(frozenset(paths))
            yield paths


def _integers(module: nn.Module) -> Iterator[tuple[AttributePath, int]]:
    for key, value in module.__dict__.items():
        if type(value) is int:
            yield (key,), value
        elif (
            not key.startswith("_")
            and hasattr(value, "__dict__")
            and not isinstance(value, (nn.Module, type))
        ):
            for inner, number in vars(value).items():
                if type(number) is int:
                    yield (key, inner), number


def divide_integers(module: nn.Module, plan: TensorPlan, variant: Sequence[AttributePath], tp: int) -> None:
    """Let modules that hold column-parallel projections count only this rank's heads, in place."""
    for name in _holders(plan):
        for path in variant:
            _divide(module.get_submodule(name), path, tp)


def _divide(module: nn.Module, path: AttributePath, tp: int) -> None:
    """Divide an integer of a twin; an object that holds it is copied first, for others may share it."""
    target: Any = module
    if len(path) == 2:
        target = copy.copy(module.__dict__.get(path[0]))
        if target is None:
            return
        object.__setattr__(module, path[0], target)
    value = vars(target).get(path[-1])
    if type(value) is int and value % tp == 0:
        object.__setattr__(target, path[-1], value // tp)


def _optimizer_ops(
    request: TraceRequest, base: Base, prepared: Prepared
) -> tuple[dict[str, tuple[OpSpec, ...]], tuple[str, ...]]:
    """Operators of one optimizer step by layer; none, and a note, when its class cannot be traced."""
    if request.optimizer is None:
        return {}, ("The run has no optimizer that we saw: its step is not in the workload.",)
    parameters = local_parameters_of(prepared.module, base.placed, prepared.live_names)
    try:
        traced = trace_optimizer(request.optimizer, parameters, prepared.subject.mode)
    except Exception as error:  # noqa: BLE001 (user code: the workload is useful without it)
        name = type(request.optimizer).__name__
        return {}, (
            f"{name}.step cannot be traced ({type(error).__name__}: {error}): its operators are missing.",
        )
    return {layer: merge_equal([_fixed(op) for op in ops]) for layer, ops in traced.items()}, ()


def _fixed(op: TracedOp) -> OpSpec:
    """An operator whose shapes do not depend on batch or sequence."""
    return OpSpec(
        op=op.op,
        phase=op.phase,
        module=op.module,
        inputs=tuple(TensorSpec(t.shape, t.dtype, t.group) for t in op.inputs),
        outputs=tuple(TensorSpec(t.shape, t.dtype, t.group) for t in op.outputs),
        attributes=op.attributes,
    )
