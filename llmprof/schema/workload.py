"""Workload: what one microbatch of a model does, free of layout, symbolic in batch and sequence.

A workload is data: forecasting from it needs no torch. Dimensions are integer polynomials in
b (sequences in the microbatch) and s (tokens in a sequence), exact over the traced sizes.
"""

from __future__ import annotations

import math

import msgspec

from llmprof.schema.operators import ITEM_BYTES

WORKLOAD_VERSION = 1

MONOMIALS = ("1", "b", "s", "bs", "ss", "bss")
"""Order of the coefficients of a `Poly`."""


class Poly(msgspec.Struct, frozen=True, array_like=True):
    """An integer polynomial c + cb*b + cs*s + cbs*b*s + css*s*s + cbss*b*s*s, divided by `div`, rounded up.

    `div` > 1 is a dimension sharded over the tensor-parallel group, such as s / 8 under sequence
    parallelism; the first rank holds the larger share when it does not divide.
    """

    c: int = 0
    cb: int = 0
    cs: int = 0
    cbs: int = 0
    css: int = 0
    cbss: int = 0
    div: int = 1

    def at(self, batch: int, seq: int) -> int:
        """Value at a batch (sequences per microbatch) and a sequence length (tokens)."""
        constant_and_batch = self.c + self.cb * batch
        value = constant_and_batch + seq * (self.cs + self.cbs * batch + seq * (self.css + self.cbss * batch))
        return -(-value // self.div)

    def plus(self, other: Poly) -> Poly:
        """Coefficient-wise sum, over the common denominator; exact where both divisions are."""
        div = math.lcm(self.div, other.div)
        mine, theirs = div // self.div, div // other.div
        return Poly(
            mine * self.c + theirs * other.c,
            mine * self.cb + theirs * other.cb,
            mine * self.cs + theirs * other.cs,
            mine * self.cbs + theirs * other.cbs,
            mine * self.css + theirs * other.css,
            mine * self.cbss + theirs * other.cbss,
            div,
        )


Dim = int | Poly
"""A tensor dimension: a constant or a polynomial in batch and sequence."""


def dim_at(dim: Dim, batch: int, seq: int) -> int:
    """Value of a dimension at a batch and a sequence length."""
    return dim if isinstance(dim, int) else dim.at(batch, seq)


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Local shape and dtype of one tensor; a tensor list is written as several specs of equal `group` > 0."""

    dims: tuple[Dim, ...]
    dtype: str
    group: int = 0

    def shape_at(self, batch: int, seq: int) -> tuple[int, ...]:
        """The shape at a batch and a sequence length."""
        return tuple(dim_at(d, batch, seq) for d in self.dims)


class OpSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operator or collective of a layer, in program order.

    Attributes:
        op: full name ("aten::mm", "_c10d_functional::all_reduce").
        phase: "forward", "backward_input", "backward_weight" or "optimizer".
        module: FQN below the layer's own module ("" is the layer itself).
        inputs: tensor inputs with local shapes; 0-dim inputs are left out.
        outputs: tensor outputs.
        count: number of consecutive equal calls.
        attributes: what changes the cost beside shapes, such as "causal".
        collective: kind of a collective ("all_reduce", ...), "" for an operator.
        axis: mesh axis of a collective ("tp").
    """

    op: str
    phase: str
    module: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    count: int = 1
    attributes: tuple[str, ...] = ()
    collective: str = ""
    axis: str = ""


class ParameterSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One parameter with its unsharded shape.

    Attributes:
        name: FQN below the layer's own module.
        tied_to: FQN (from the root) of the parameter that it shares storage with, "" when its own.
        matmul: True when a matmul uses it (counts for MFU); an input embedding does not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    tied_to: str = ""
    matmul: bool = True


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A kind of layer: the prologue (embedding), a distinct repeated block, the epilogue (head) or the loss.

    Attributes:
        name: unique name, such as "prologue", "block0", "epilogue", "loss".
        kind: "prologue", "block", "epilogue" or "loss".
        module: FQN of its first instance ("layers.0"), "" for prologue, epilogue and loss.
        class_name: class of the block's module.
        parameters: its parameters, unsharded.
    """

    name: str
    kind: str
    module: str = ""
    class_name: str = ""
    parameters: tuple[ParameterSpec, ...] = ()


class LayerTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one layer does for one microbatch on one rank of a class.

    Attributes:
        ops: forward, then backward, then optimizer, in program order.
        saved: tensors kept from forward to backward, storages counted once, parameters left out.
        boundary: the activation handed to the next layer (local shape).
        parameters: local shapes of the layer's parameters in the order of `LayerSpec.parameters`.
    """

    ops: tuple[OpSpec, ...] = ()
    saved: tuple[TensorSpec, ...] = ()
    boundary: TensorSpec | None = None
    parameters: tuple[tuple[int, ...], ...] = ()


class ClassTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All layers under one class of degrees (degrees are never fitted: each is traced).

    Attributes:
        tp: tensor-parallel degree.
        sp: True when activations between tensor-parallel regions are sharded over the sequence.
        batch, seq: None when the trace is exact in batch / sequence; else the one value it holds for.
        traced_at: the (batch, seq) pairs it was fitted on; the last one was held out for the check.
        layers: by LayerSpec name.
        replicated_flops_fraction: share of matmul FLOPs without a tensor-parallel plan.
        replicated_modules: the modules that do that work.
    """

    tp: int = 1
    sp: bool = False
    batch: int | None = None
    seq: int | None = None
    traced_at: tuple[tuple[int, int], ...] = ()
    layers: dict[str, LayerTrace] = {}
    replicated_flops_fraction: float = 0.0
    replicated_modules: tuple[str, ...] = ()


class OptimizerSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The optimizer: its state tensors of the parameter's size, and how it launches.

    Attributes:
        name: class name, such as "AdamW".
        state_slots: state tensors per parameter with the parameter's shape (AdamW: 2).
        state_dtype: dtype of those tensors.
        gradient_dtype: in which gradients are kept and reduced beside float32 masters; "" for float32.
        launch: "single", "foreach" or "fused".
    """

    name: str = "AdamW"
    state_slots: int = 2
    state_dtype: str = "float32"
    gradient_dtype: str = ""
    launch: str = "single"


class Workload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model as layers, parameters and traced classes of degrees.

    Attributes:
        sequence: run-length list of layer names in forward order, such as
            (("prologue", 1), ("block0", 32), ("epilogue", 1), ("loss", 1)).
        classes: traced classes; the class tp=1 always exists.
        batch, seq: the captured microbatch (sequences) and sequence length (tokens).
        accum: captured microbatches per step and replica.
        dp: captured data-parallel degree (for the captured global batch).
        tokens_per_sequence_dim: True when `seq` counts tokens (language model), False otherwise.
        precision: compute dtype of the matmuls when captured.
        implementation: "eager", "compile", "megatron" or "te".
        tp_refusal: why classes with tp > 1 are missing, "" when they are not.
        warnings: what the trace could not see, each one sentence.
        source: "traced", "rows" (built from captured rows alone), or "reference" (a decoder that was not captured).
    """

    version: int = WORKLOAD_VERSION
    name: str = ""
    layers: tuple[LayerSpec, ...] = ()
    sequence: tuple[tuple[str, int], ...] = ()
    classes: tuple[ClassTrace, ...] = ()
    optimizer: OptimizerSpec = OptimizerSpec()
    batch: int = 1
    seq: int = 1
    accum: int = 1
    dp: int = 1
    tokens_per_sequence_dim: bool = True
    precision: str = "float32"
    implementation: str = "eager"
    tp_refusal: str = ""
    warnings: tuple[str, ...] = ()
    source: str = "traced"

    def layer(self, name: str) -> LayerSpec:
        """The layer spec of a name; KeyError when there is none."""
        for spec in self.layers:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def saved_bytes(self, trace: ClassTrace, *, batch: int, seq: int) -> int:
        """Bytes that autograd keeps from the forward to the backward pass of one microbatch, over all layers.

        Args:
            trace: one of `classes`.
            batch: sequences in the microbatch.
            seq: tokens in a sequence.
        """
        by_layer = {
            name: sum(math.prod(t.shape_at(batch, seq)) * ITEM_BYTES.get(t.dtype, 4) for t in layer.saved)
            for name, layer in trace.layers.items()
        }
        return sum(by_layer.get(name, 0) * count for name, count in self.sequence)

    def find_class(self, tp: int, *, sp: bool) -> ClassTrace | None:
        """The traced class of the degrees, or None."""
        for trace in self.classes:
            if trace.tp == tp and trace.sp == sp:
                return trace
        return None
