"""Workload, layout, sequence length -> the operators, parameters and stages of each rank, in concrete shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod

from llmprof.errors import WorkloadError
from llmprof.extrapolate.precision import PrecisionRule
from llmprof.extrapolate.request import choose_class
from llmprof.extrapolate.split import Names, split_stages
from llmprof.schema.layout import Layout
from llmprof.schema.operators import (
    ITEM_BYTES,
    MATMUL_FAMILIES,
    Tensor,
    family,
    flops,
    size_bytes,
)
from llmprof.schema.workload import ClassTrace, LayerSpec, LayerTrace, OpSpec, TensorSpec, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """`count` equal calls of an operator or collective with concrete local shapes.

    Attributes:
        wrapped: it acts on a distributed tensor (DTensor), which costs host time beyond the local operator.
    """

    op: str
    phase: str
    module: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    count: int
    attributes: frozenset[str]
    collective: str
    axis: str
    family: str
    wrapped: bool = False

    @property
    def flops(self) -> int:
        """FLOPs of one call."""
        return flops(self.op, self.inputs, self.outputs, self.attributes)

    @property
    def message_bytes(self) -> int:
        """Message of a collective: the full buffer for gather and scatter, else the tensor."""
        tensors = self.outputs if self.collective == "all_gather" else self.inputs
        return sum(size_bytes(t) for t in tensors or self.inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of a layer: elements on one tensor-parallel rank, dtype as captured."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    tied_to: str

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """What one layer does for one microbatch on one rank, before data parallelism.

    Attributes:
        saved_bytes: kept from forward to backward; `boundary_bytes` is the part handed to the next layer.
        temporary_bytes: the two largest results of one backward operator's neighbourhood, live at once.
    """

    name: str
    kind: str
    module: str
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    optimizer: tuple[Op, ...]
    parameters: tuple[Parameter, ...]
    saved_bytes: int
    boundary_bytes: int
    temporary_bytes: int
    _sizes: dict[tuple[bool, str, bool], int] = field(default_factory=dict, compare=False, repr=False)

    def held_bytes(self, *, tied: bool, dtype: str, trainable: bool) -> int:
        """Bytes of its parameters, in their own dtype or in the one given.

        Args:
            tied: with those that are ties to another layer's.
            trainable: of those that are trained alone.
        """
        key = (tied, dtype, trainable)
        if key not in self._sizes:
            held = self.parameters if tied else self.own_parameters
            self._sizes[key] = parameter_bytes(tuple(p for p in held if p.trainable or not trainable), dtype)
        return self._sizes[key]

    @property
    def matmul_flops(self) -> int:
        """Matmul FLOPs of forward and backward of one microbatch."""
        return sum(o.count * o.flops for o in (*self.forward, *self.backward) if o.family in MATMUL_FAMILIES)

    @property
    def own_parameters(self) -> tuple[Parameter, ...]:
        """Parameters that are not a tie to another layer's."""
        return tuple(p for p in self.parameters if not p.tied_to)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A workload laid over stages.

    Attributes:
        layers: work by layer name.
        virtual: for each virtual stage its layers in forward order, run-length encoded; virtual stage v is a chunk of
            stage v modulo pp.
        tied: parameters that live on two stages (their gradients are summed at the step's end).
    """

    workload: Workload
    layout: Layout
    seq: int
    precision: PrecisionRule
    layers: dict[str, LayerWork]
    virtual: tuple[Names, ...]
    tied: tuple[Parameter, ...] = ()
    _stages: list[tuple[Names, ...]] = field(default_factory=list, init=False, compare=False, repr=False)

    @property
    def stages(self) -> tuple[Names, ...]:
        """For each pipeline stage the layers of all its chunks, run-length encoded."""
        if not self._stages:
            pp = self.layout.pp
            self._stages.append(
                tuple(tuple(chain.from_iterable(self.virtual[stage::pp])) for stage in range(pp))
            )
        return self._stages[0]

    def stage_parameters(self, stage: int) -> tuple[Parameter, ...]:
        """Parameters held by a stage, ties within the stage once, ties to another stage as a copy."""
        return tuple(p for name, count in self.stages[stage] for p in self.held(stage, name) * count)

    def held(self, stage: int, name: str) -> tuple[Parameter, ...]:
        """Parameters of one layer as a stage holds them: a tie to another stage is a copy."""
        layer = self.layers[name]
        return layer.own_parameters if stage == 0 else layer.parameters


def partition(
    workload: Workload,
    layout: Layout,
    *,
    seq: int,
    precision: PrecisionRule,
    layers: dict[str, LayerWork] | None = None,
) -> Plan:
    """Lay a workload over the stages and tensor-parallel ranks of a layout.

    Args:
        seq: tokens per sequence.
        layers: what `evaluate_layers` gave for the same arguments, when it is at hand.

    Raises:
        WorkloadError: the class of degrees was not traced.
        LayoutError: more stages than blocks, or too much work without a tensor-parallel plan.
    """
    layers = layers or evaluate_layers(workload, layout, seq=seq, precision=precision)
    virtual = split_stages(workload, layers, layout.pp, layout.vpp)
    tied = (
        tuple(p for n, _ in virtual[-1] for p in layers[n].parameters if p.tied_to) if layout.pp > 1 else ()
    )
    return Plan(
        workload=workload,
        layout=layout,
        seq=seq,
        precision=precision,
        layers=layers,
        virtual=virtual,
        tied=tied,
    )


def evaluate_layers(
    workload: Workload, layout: Layout, *, seq: int, precision: PrecisionRule
) -> dict[str, LayerWork]:
    """Every layer in concrete shapes; depends on the layout's tp, sp and mb alone."""
    trace = choose_class(workload, layout, seq)
    evaluate = _Evaluate(
        batch=layout.mb,
        seq=seq,
        precision=precision,
        sp=layout.sp,
        dispatched=workload.implementation == "eager",
    )
    return {spec.name: evaluate.layer(spec, _layer_trace(trace, spec)) for spec in workload.layers}


def _layer_trace(trace: ClassTrace, spec: LayerSpec) -> LayerTrace:
    found = trace.layers.get(spec.name)
    if found is None:
        raise WorkloadError(
            f"the trace of tp={trace.tp} has no layer {spec.name!r}", hint="trace the model again"
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evaluate:
    """Turns symbolic specs into concrete ones at one (batch, seq, precision).

    Attributes:
        dispatched: operators on distributed tensors go through DTensor; a compiler and Megatron's own modules
            call the local operators.
    """

    batch: int
    seq: int
    precision: PrecisionRule
    sp: bool = False
    dispatched: bool = True
    _known: dict[tuple[tuple[TensorSpec, ...], str], tuple[Tensor, ...]] = field(default_factory=dict)

    def layer(self, spec: LayerSpec, trace: LayerTrace) -> LayerWork:
        locals_ = trace.parameters or tuple(p.shape for p in spec.parameters)
        distributed = _Distributed.of(spec, locals_, sp=self.sp)
        ops = [
            self.op(o, loss=spec.kind == "loss", wrapped=self.dispatched and distributed.wraps(o))
            for o in trace.ops
            if not _is_bookkeeping(o)
        ]
        backward = tuple(o for o in ops if o.phase.startswith("backward"))
        stored = "own" if spec.kind == "loss" else "activations"
        saved = self.tensors(tuple(trace.saved), stored)
        boundary = self.tensors((trace.boundary,), stored) if trace.boundary else ()
        results = sorted((sum(size_bytes(t) for t in o.outputs) for o in backward), reverse=True)
        return LayerWork(
            name=spec.name,
            kind=spec.kind,
            module=spec.module,
            forward=tuple(o for o in ops if o.phase == "forward"),
            backward=backward,
            optimizer=tuple(o for o in ops if o.phase == "optimizer"),
            parameters=tuple(
                Parameter(
                    name=p.name, shape=tuple(shape), dtype=p.dtype, trainable=p.trainable, tied_to=p.tied_to
                )
                for p, shape in zip(spec.parameters, locals_, strict=True)
            ),
            saved_bytes=sum(size_bytes(t) for t in saved),
            boundary_bytes=sum(size_bytes(t) for t in boundary),
            temporary_bytes=sum(results[:2]),
        )

    def tensors(self, specs: tuple[TensorSpec, ...], rule: str) -> tuple[Tensor, ...]:
        """Concrete tensors, in their own dtype or by the rule for "activations" or "matmul"; equal lists are one."""
        found = self._known.get((specs, rule))
        if found is None:
            found = tuple(Tensor(t.shape_at(self.batch, self.seq), t.dtype, t.group) for t in specs)
            if rule == "matmul":
                found = self.precision.matmul(found)
            elif rule == "activations":
                found = self.precision.activations(found)
            self._known[specs, rule] = found
        return found

    def op(self, spec: OpSpec, *, loss: bool, wrapped: bool) -> Op:
        found = "collective" if spec.collective else family(spec.op)
        read = written = "own"
        if spec.phase != "optimizer" and self.precision.changes:
            if found in MATMUL_FAMILIES:
                read, written = "matmul", "activations"
            elif not loss:
                read = written = "activations"
        return Op(
            op=spec.op,
            phase=spec.phase,
            module=spec.module,
            inputs=self.tensors(spec.inputs, read),
            outputs=self.tensors(spec.outputs, written),
            count=spec.count,
            attributes=frozenset(spec.attributes),
            collective=spec.collective,
            axis=spec.axis,
            family=found,
            wrapped=wrapped,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Distributed:
    """What of a layer is a distributed tensor in a tensor-parallel class.

    Attributes:
        modules: FQNs (below the layer) of modules whose parameters are.
        shapes: local shapes of those parameters, by which optimizer operators are known.
    """

    modules: frozenset[str]
    shapes: frozenset[tuple[int, ...]]

    @classmethod
    def of(cls, spec: LayerSpec, shapes: Sequence[Sequence[int]], *, sp: bool) -> _Distributed:
        sharded = [
            (p.name, tuple(local))
            for p, local in zip(spec.parameters, shapes, strict=True)
            if sp or tuple(local) != p.shape
        ]
        return cls(
            modules=frozenset(name.rpartition(".")[0] for name, _ in sharded),
            shapes=frozenset(shape for _, shape in sharded),
        )

    def wraps(self, op: OpSpec) -> bool:
        if op.collective or not self.modules or not op.inputs:
            return False
        if op.phase == "optimizer":
            return op.inputs[0].dims in self.shapes
        return op.module in self.modules


def _is_bookkeeping(spec: OpSpec) -> bool:
    """True for what exists in a trace on fake tensors only: profiler scopes, detaching saved tensors."""
    return spec.op.startswith("profiler::") or (spec.op == "aten::detach" and spec.phase != "forward")


def parameter_bytes(parameters: tuple[Parameter, ...], dtype: str = "") -> int:
    """Bytes of parameters, in their own dtype or in the one given."""
    return sum(p.numel * ITEM_BYTES.get(dtype or p.dtype, 4) for p in parameters)


def held_bytes(plan: Plan, stage: int, dtype: str = "", *, trainable: bool = False) -> int:
    """Bytes of the parameters that a stage holds (see `Plan.stage_parameters`), or of the trainable ones alone.

    Args:
        dtype: counted in this dtype; "" for their own.
    """
    return sum(
        count * plan.layers[name].held_bytes(tied=stage > 0, dtype=dtype, trainable=trainable)
        for name, count in plan.stages[stage]
    )
