"""What one rank does in one layer, in concrete shapes: operators, collectives, parameters and what is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from llmprof.schema.layout import Layout
from llmprof.schema.operators import ITEM_BYTES, MATMUL_FAMILIES, Tensor, flops, size_bytes

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """`count` equal calls of an operator or collective with concrete local shapes.

    Attributes:
        wrapped: it acts on a distributed tensor (DTensor), which costs host time beyond the local operator.
        routed: it acts on tokens that routers send to experts over ranks, of which one rank has more than others.
        round: operators and messages with the same number above 0 run beside each other, as often as they count; 0 runs
            in line.
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
    routed: bool = False
    round: int = 0

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
    """One parameter of a layer: elements on one rank before data parallelism, dtype as captured.

    Attributes:
        expert: it is divided over expert-parallel ranks, so fewer ranks hold the same.
    """

    name: str
    shape: Shape
    dtype: str
    trainable: bool
    tied_to: str
    expert: bool = False

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
    _sizes: dict[tuple[bool, bool, bool, str], int] = field(default_factory=dict, compare=False, repr=False)

    def held_bytes(self, *, experts: bool, tied: bool, dtype: str, trainable: bool) -> int:
        """Bytes of its parameters, in their own dtype or in the one given.

        Args:
            experts: of those that are divided over expert-parallel ranks, else of the others.
            tied: with those that are ties to another layer's.
            trainable: of those that are trained alone.
        """
        key = (experts, tied, trainable, dtype)
        if key not in self._sizes:
            held = self.parameters if tied else self.own_parameters
            counted = (p for p in held if p.expert == experts and (p.trainable or not trainable))
            self._sizes[key] = parameter_bytes(tuple(counted), dtype)
        return self._sizes[key]

    @property
    def matmul_flops(self) -> int:
        """Matmul FLOPs of forward and backward of one microbatch."""
        return sum(o.count * o.flops for o in (*self.forward, *self.backward) if o.family in MATMUL_FAMILIES)

    @property
    def expert_shapes(self) -> frozenset[Shape]:
        """Shapes of the parameters that are divided over expert-parallel ranks."""
        return frozenset(p.shape for p in self.parameters if p.expert)

    @property
    def own_parameters(self) -> tuple[Parameter, ...]:
        """Parameters that are not a tie to another layer's."""
        return tuple(p for p in self.parameters if not p.tied_to)


class Shards(NamedTuple):
    """Ranks over which state is divided: that of experts, and all other."""

    common: int
    experts: int

    @classmethod
    def of(cls, layout: Layout) -> Shards:
        """Those of a layout."""
        return cls(layout.state_shards, layout.expert_shards)

    def by(self, parameter: Parameter) -> int:
        """Ranks that share a parameter's state."""
        return self.experts if parameter.expert else self.common


def parameter_bytes(parameters: tuple[Parameter, ...], dtype: str = "") -> int:
    """Bytes of parameters, in their own dtype or in the one given."""
    return sum(p.numel * ITEM_BYTES.get(dtype or p.dtype, 4) for p in parameters)
