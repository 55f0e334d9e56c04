"""Dtype rule: the dtypes of a trace captured in one precision, as the target precision would have them."""

from __future__ import annotations

from dataclasses import dataclass

from llmprof.schema.operators import Tensor, family, split_name

_SCORES = ("bmm", "baddbmm")
"""Matmuls of attention that is written out; those of experts are grouped."""
HALF = ("bfloat16", "float16")
FLOATS = ("float32", "bfloat16", "float16", "float64")
_STORED = {"float8": "bfloat16", "tfloat32": "float32"}
"""Dtype in which activations are kept when matmuls compute in the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRule:
    """How dtypes change from the captured to the target precision.

    Attributes:
        captured: compute dtype of the matmuls when captured.
        target: compute dtype asked for; matmul peaks are looked up under it.
        masters: parameters are float32 masters beside a working copy in the captured precision.
        narrow: gradients of such parameters are kept and reduced in the activation dtype, not in float32.
    """

    captured: str
    target: str
    masters: bool = False
    narrow: bool = False

    @property
    def changes(self) -> bool:
        """True when the target is not what was captured."""
        return self.captured != self.target

    @property
    def activation(self) -> str:
        """Dtype of activations between operators, of gathered weights and of saved tensors."""
        return _STORED.get(self.target, self.target)

    @property
    def mixed(self) -> bool:
        """True when float32 master weights are kept beside a narrower working copy."""
        return (self.changes or self.masters) and self.activation in HALF

    @property
    def working(self) -> str:
        """Dtype in which parameters are used and gathered, "" when it is their own."""
        return self.activation if self.changes or self.masters else ""

    @property
    def gradients(self) -> str:
        """Dtype in which gradients are kept and reduced, "" when it is that of their parameter."""
        return self.activation if self.narrow and self.mixed else ""

    def reaches(self, op: str) -> bool:
        """Whether a matmul takes its inputs in the target: 8 bit are for matmuls with weights, not for attention."""
        attention = family(op) == "attention" or split_name(op)[1] in _SCORES
        return not (attention and self.target == "float8")

    def activations(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors of an operator outside loss and optimizer, floats in the activation dtype."""
        return self._convert(tensors, self.activation)

    def matmul(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors of a matmul or attention, floats in the compute dtype."""
        return self._convert(tensors, self.target)

    def _convert(self, tensors: tuple[Tensor, ...], dtype: str) -> tuple[Tensor, ...]:
        if not self.changes:
            return tensors
        return tuple(t._replace(dtype=dtype) if t.dtype in FLOATS else t for t in tensors)


def choose_precision(
    *, captured: str, asked: str, device_kind: str, masters: bool = False, narrow: bool = False
) -> PrecisionRule:
    """The rule for a layout's `precision` (or "") on a device kind.

    Without a wish the captured precision stays, except that a float32 capture is forecast in bfloat16 on a GPU.

    Args:
        masters: the workload's parameters are float32 masters, as those of a reference decoder.
        narrow: as in `PrecisionRule`.
    """
    target = asked
    if not target:
        target = "bfloat16" if captured == "float32" and device_kind != "cpu" else captured
    return PrecisionRule(captured=captured, target=target, masters=masters, narrow=narrow)


def precision_assumption(rule: PrecisionRule) -> str | None:
    """One sentence for the user, None when nothing is changed."""
    if not rule.changes:
        kept = f", gradients in {rule.gradients}" if rule.gradients else ""
        return (
            f"precision {rule.target}; float32 master weights and optimizer state{kept}"
            if rule.mixed
            else None
        )
    wide = "float32 master weights, gradients and optimizer state"
    if rule.gradients:
        wide = f"float32 master weights and optimizer state, gradients in {rule.gradients}"
    masters = f"; {wide}" if rule.mixed else ""
    return (
        f"precision {rule.target} (captured: {rule.captured}): matmul and attention inputs and saved activations "
        f"in {rule.activation}; loss and norm statistics in float32{masters}"
    )
