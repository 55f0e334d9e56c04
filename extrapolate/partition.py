"""Workload, layout, sequence length -> the operators, parameters and stages of each rank, in concrete shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from llmprof.errors import WorkloadError
from llmprof.extrapolate.context import divide_attention, held_messages_bytes, is_divided, local_sequence
from llmprof.extrapolate.experts import check_experts, divide_experts
from llmprof.extrapolate.precision import PrecisionRule
from llmprof.extrapolate.request import choose_class
from llmprof.extrapolate.split import Names, split_stages
from llmprof.extrapolate.work import LayerWork, Op, Parameter
from llmprof.schema.layout import Layout
from llmprof.schema.operators import MATMUL_FAMILIES, Tensor, family, size_bytes
from llmprof.schema.workload import ClassTrace, LayerSpec, LayerTrace, OpSpec, TensorSpec, Workload


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
    """Every layer in concrete shapes; depends on what is in a `LayerKey` alone."""
    local = local_sequence(layout, seq)
    trace = choose_class(workload, layout, local)
    evaluate = _Evaluate(
        layout=layout,
        seq=local,
        precision=precision,
        dispatched=workload.implementation == "eager",
    )
    layers = {spec.name: evaluate.layer(spec, _layer_trace(trace, spec)) for spec in workload.layers}
    check_experts(layers.values(), layout)
    return layers


def _layer_trace(trace: ClassTrace, spec: LayerSpec) -> LayerTrace:
    found = trace.layers.get(spec.name)
    if found is None:
        raise WorkloadError(
            f"the trace of tp={trace.tp} has no layer {spec.name!r}", hint="trace the model again"
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evaluate:
    """Turns symbolic specs into concrete ones at one microbatch, sequence and precision.

    Attributes:
        seq: tokens that one context-parallel rank holds.
        dispatched: operators on distributed tensors go through DTensor; a compiler and Megatron's own modules
            call the local operators.
    """

    layout: Layout
    seq: int
    precision: PrecisionRule
    dispatched: bool = True
    _known: dict[tuple[tuple[TensorSpec, ...], str], tuple[Tensor, ...]] = field(default_factory=dict)

    def layer(self, spec: LayerSpec, trace: LayerTrace) -> LayerWork:
        locals_ = trace.parameters or tuple(p.shape for p in spec.parameters)
        distributed = _Distributed.of(spec, locals_, sp=self.layout.sp)
        ops = [
            op
            for o in trace.ops
            if not _is_bookkeeping(o)
            for op in self.ops(o, loss=spec.kind == "loss", wrapped=self.dispatched and distributed.wraps(o))
        ]
        parameters = tuple(
            Parameter(
                name=p.name, shape=tuple(shape), dtype=p.dtype, trainable=p.trainable, tied_to=p.tied_to
            )
            for p, shape in zip(spec.parameters, locals_, strict=True)
        )
        if self.layout.ep > 1:
            ops, parameters = divide_experts(ops, parameters, self.layout)
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
            parameters=parameters,
            saved_bytes=sum(size_bytes(t) for t in saved),
            boundary_bytes=sum(size_bytes(t) for t in boundary),
            temporary_bytes=sum(results[:2]) + held_messages_bytes(backward),
        )

    def tensors(self, specs: tuple[TensorSpec, ...], rule: str) -> tuple[Tensor, ...]:
        """Concrete tensors, in their own dtype or by the rule for "activations" or "matmul"; equal lists are one."""
        found = self._known.get((specs, rule))
        if found is None:
            found = tuple(Tensor(t.shape_at(self.layout.mb, self.seq), t.dtype, t.group) for t in specs)
            if rule == "matmul":
                found = self.precision.matmul(found)
            elif rule == "activations":
                found = self.precision.activations(found)
            self._known[specs, rule] = found
        return found

    def ops(self, spec: OpSpec, *, loss: bool, wrapped: bool) -> Iterator[Op]:
        """An operator, or what takes the place of attention under context parallelism."""
        op = self.op(spec, loss=loss, wrapped=wrapped)
        if self.layout.cp > 1 and is_divided(spec):
            yield from divide_attention(op, self.layout)
        else:
            yield op

    def op(self, spec: OpSpec, *, loss: bool, wrapped: bool) -> Op:
        found = "collective" if spec.collective else family(spec.op)
        read = written = "own"
        if spec.phase != "optimizer" and self.precision.changes:
            if found in MATMUL_FAMILIES:
                read, written = "matmul" if self.precision.reaches(spec.op) else "activations", "activations"
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


def held_bytes(
    plan: Plan, stage: int, dtype: str = "", *, trainable: bool = False, experts: bool | None = None
) -> int:
    """Bytes of the parameters that a stage holds (see `Plan.stage_parameters`), or of the trainable ones alone.

    Args:
        experts: True for those that are divided over expert-parallel ranks alone, False for the others, None for both.
        dtype: counted in this dtype; "" for their own.
    """
    return sum(
        count * plan.layers[name].held_bytes(experts=kind, tied=stage > 0, dtype=dtype, trainable=trainable)
        for name, count in plan.stages[stage]
        for kind in ((False, True) if experts is None else (experts,))
    )
