"""How published tables count model FLOPs and MFU: one formula for each key, to check that a table was read correctly.

The product has one convention of its own (`llmprof.extrapolate.baselines`); these are for recomputing what a source
printed. Legend: N all parameters, E one embedding matrix (vocabulary x hidden), W matmul weights of all blocks, L layers,
h hidden, s tokens per sequence, V vocabulary. All are FLOPs per token, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmprof.judge.cells import Reject, flag, number, required, text


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the formulas count with."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    gated: bool
    params: float

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Sizes:
        """Sizes of a row.

        Raises:
            Reject: a size is missing, or no number.
        """
        heads = required(row, "heads")
        kv_heads = text(row, "kv_heads")
        hidden = required(row, "hidden")
        return cls(
            layers=required(row, "layers"),
            hidden=hidden,
            ffn=required(row, "ffn_hidden") if text(row, "ffn_hidden") else 4 * hidden,
            heads=heads,
            kv_heads=required(row, "kv_heads") if kv_heads else heads,
            vocab=required(row, "vocab"),
            seq=required(row, "seq_len"),
            gated=bool(flag(row, "gated_mlp")),
            params=(number(row, "params_B") or 0.0) * 1e9,
        )

    @property
    def embedding(self) -> int:
        """E."""
        return self.vocab * self.hidden

    @property
    def block_weights(self) -> float:
        """W: L (2 h^2 + 2 h^2 kv / heads + (2, gated 3) h ffn)."""
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        return self.layers * (attention + (3 if self.gated else 2) * self.hidden * self.ffn)

    @property
    def full_attention(self) -> int:
        """12 L h s: both matmuls over the full square, forward and backward."""
        return 12 * self.layers * self.hidden * self.seq


def palm(z: Sizes) -> float:
    """6 N + 12 L h s, both embeddings counted (Chowdhery et al. 2022, appendix B, attention not halved)."""
    return 6 * z.params + z.full_attention


def megatron_2022(z: Sizes) -> float:
    """72 L h^2 (1 + s / 6h + V / 12Lh) (Korthikanti et al. 2022, appendix A)."""
    return _megatron(z, 72, 12)


def megatron_2021_hardware(z: Sizes) -> float:
    """96 L h^2 (1 + s / 6h + V / 16Lh): the recomputed forward counts too (Narayanan et al. 2021, equation 3)."""
    return _megatron(z, 96, 16)


def _megatron(z: Sizes, factor: int, head: int) -> float:
    inner = 1 + z.seq / (6 * z.hidden) + z.vocab / (head * z.layers * z.hidden)
    return factor * z.layers * z.hidden**2 * inner


def mosaic(z: Sizes) -> float:
    """6 N + 12 L h s, N with the tied embedding once (llm-foundry's benchmark page)."""
    return 6 * z.params + z.full_attention


def nvidia_dgxc(z: Sizes) -> float:
    """6 (W + E) + 12 L h s: the head once, no input embedding (constants of NVIDIA's benchmark recipes)."""
    return 6 * (z.block_weights + z.embedding) + z.full_attention


def stas(z: Sizes) -> float:
    """6 N + 6 L h s: attention halved."""
    return 6 * z.params + z.full_attention / 2


FORMULAS: dict[str, Callable[[Sizes], float]] = {
    "palm": palm,
    "megatron-2022": megatron_2022,
    "megatron-2021-hardware": megatron_2021_hardware,
    "mosaic": mosaic,
    "nvidia-dgxc": nvidia_dgxc,
    "6N(all)+causal attention": stas,
}
"""Formula by the first words of a table's `mfu_formula`; the longest that fits counts."""


def formula_of(cell: str) -> Callable[[Sizes], float] | None:
    """The formula that a cell of `mfu_formula` names, None for another."""
    keys = [key for key in FORMULAS if cell.strip().startswith(key)]
    return FORMULAS[max(keys, key=len)] if keys else None


def recomputed_mfu(row: Mapping[str, str]) -> float | None:
    """MFU of a row by its source's own formula, from its step time; None where something is missing.

    FLOPs per token x global batch x sequence length / (step time x GPUs x the peak that the source divides by).
    """
    formula = formula_of(text(row, "mfu_formula"))
    try:
        values = [number(row, key) for key in ("step_time_s", "global_batch", "n_gpus", "peak_tflops_ref")]
        sizes = Sizes.of(row)
    except Reject:
        return None
    if formula is None or not all(values):
        return None
    step_s, batch, gpus, peak_tflops = (value or 0.0 for value in values)
    return formula(sizes) * batch * sizes.seq / (step_s * gpus * peak_tflops * 1e12)
