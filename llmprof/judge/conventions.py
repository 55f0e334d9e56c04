"""How published tables count model FLOPs and MFU: one formula for each key, to check that a table was read correctly.

The product has one convention of its own (`llmprof.extrapolate.baselines`); these are for recomputing what a source
printed. Legend: N all parameters, E one embedding matrix (vocabulary x hidden), W matmul weights of all blocks, L layers,
h hidden, s tokens per sequence, V vocabulary. All are FLOPs per token, forward and backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmprof.judge.cells import Reject, flag, number, positive, required, text, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the formulas count with.

    Attributes:
        ffn: width of one up projection; 0 where it is not stated and has no usual value (gated).
        params: N as the table has it; 0 where it has none.
        logged_params: N as the run's own log has it: a tied matrix twice under pipeline parallelism; 0 where not logged.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    gated: bool
    params: float
    logged_params: float = 0.0

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Sizes:
        """Sizes of a row.

        Raises:
            Reject: a size is missing, or no number; or the model has experts, for which no formula here is meant.
        """
        if number(row, "n_experts"):
            raise Reject("no formula for experts")
        heads = required(row, "heads")
        kv_heads = text(row, "kv_heads")
        hidden = required(row, "hidden")
        gated = bool(flag(row, "gated_mlp"))
        return cls(
            layers=required(row, "layers"),
            hidden=hidden,
            ffn=whole(row, "ffn_hidden") or (0 if gated else 4 * hidden),
            heads=heads,
            kv_heads=required(row, "kv_heads") if kv_heads else heads,
            vocab=required(row, "vocab"),
            seq=required(row, "seq_len"),
            gated=gated,
            params=(positive(row, "params_B") or 0.0) * 1e9,
            logged_params=_scaled(text(row, "params_reported")),
        )

    @property
    def embedding(self) -> int:
        """E."""
        return self.vocab * self.hidden

    @property
    def block_weights(self) -> float:
        """W: L (2 h^2 + 2 h^2 kv / heads + (2, gated 3) h ffn).

        Raises:
            Reject: the width of the feed-forward is not known.
        """
        if not self.ffn:
            raise Reject("empty cell: ffn_hidden")
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        return self.layers * (attention + (3 if self.gated else 2) * self.hidden * self.ffn)

    @property
    def full_attention(self) -> int:
        """12 L h s: both matmuls over the full square, forward and backward."""
        return 12 * self.layers * self.hidden * self.seq


_SCALES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def _scaled(cell: str) -> float:
    """A number such as "1.34G"; 0 where the cell is empty."""
    scale = _SCALES.get(cell[-1:].upper(), 1.0)
    return scale * (positive({"params": cell if scale == 1.0 else cell[:-1]}, "params") or 0.0)


def palm(z: Sizes) -> float:
    """6 N + 12 L h s, both embeddings counted (Chowdhery et al. 2022, appendix B, attention not halved).

    Where the table has no N, it is W + 2 E.
    """
    return 6 * (z.params or z.block_weights + 2 * z.embedding) + z.full_attention


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
    """6 N + 12 L h s, N with the tied embedding once and the position table (llm-foundry's benchmark page).

    Where the table has no N, it is W + E + s h.
    """
    return 6 * (z.params or z.block_weights + z.embedding + z.seq * z.hidden) + z.full_attention


def nvidia_dgxc(z: Sizes) -> float:
    """6 (W + E) + 12 L h s: the head once, no input embedding (constants of NVIDIA's benchmark recipes, NeMo 24.07)."""
    return 6 * (z.block_weights + z.embedding) + z.full_attention


def nvidia_model_flops(z: Sizes) -> float:
    """6 (W + E) + 6 L h s: as `nvidia_dgxc` with attention halved (TFLOP/s of Megatron-Bridge's performance pages)."""
    return 6 * (z.block_weights + z.embedding) + z.full_attention / 2


def hf_nanotron(z: Sizes) -> float:
    """6 N + 12 L h s, N as logged (Hugging Face's H100 sweep).

    Raises:
        Reject: N as logged is not known: with tied embeddings it depends on the layout.
    """
    if not z.logged_params:
        raise Reject("empty cell: params_reported")
    return 6 * z.logged_params + z.full_attention


def stas(z: Sizes) -> float:
    """6 N + 6 L h s, both embeddings counted, attention halved (Bekman's ml-engineering book)."""
    return palm(z) - z.full_attention / 2


FORMULAS: dict[str, Callable[[Sizes], float]] = {
    "palm": palm,
    "megatron-2022": megatron_2022,
    "megatron-2021-hardware": megatron_2021_hardware,
    "mosaic": mosaic,
    "nvidia-dgxc": nvidia_dgxc,
    "nvidia model TFLOP/s": nvidia_model_flops,
    "nvidia model-FLOPs (TFLOP/s/GPU reported)": nvidia_dgxc,
    "nvidia model-FLOPs (TFLOP/s/GPU reported, no MFU)": nvidia_model_flops,
    "hf-nanotron": hf_nanotron,
    "palm with the reported parameter count": hf_nanotron,
    "stas": stas,
    "6N(all)+causal attention": stas,
}
"""Formula by the first words of a table's `mfu_formula`; the longest that fits counts."""
MODEL_FORMULAS: dict[Callable[[Sizes], float], Callable[[Sizes], float]] = {
    megatron_2021_hardware: megatron_2022
}
"""Where a formula counts hardware FLOPs, the one of the same authors that counts the model's. Not 6/8 of it: of the head,
which is not recomputed, the older formula counts no second forward either, so 6/8 would be up to 2 % low."""


def formula_of(cell: str) -> Callable[[Sizes], float] | None:
    """The formula that a cell of `mfu_formula` names, None for another."""
    keys = [key for key in FORMULAS if re.match(rf"\s*{re.escape(key)}(?![\w-])", cell)]
    return FORMULAS[max(keys, key=len)] if keys else None


def recomputed_tflops(row: Mapping[str, str]) -> float | None:
    """TFLOP/s of each GPU as the source counts them, from the step time; None where something is missing."""
    formula = formula_of(text(row, "mfu_formula"))
    return None if formula is None else _tflops(row, formula)


def recomputed_mfu(row: Mapping[str, str]) -> float | None:
    """MFU of a row as the source counts it, over the peak that the source divides by; None where something is missing."""
    formula = formula_of(text(row, "mfu_formula"))
    try:
        peak_tflops = positive(row, "peak_tflops_ref")
    except Reject:
        return None
    tflops = None if formula is None else _tflops(row, MODEL_FORMULAS.get(formula, formula))
    return None if tflops is None or peak_tflops is None else tflops / peak_tflops


def flops_per_step(row: Mapping[str, str], formula: Callable[[Sizes], float]) -> float:
    """FLOPs of a step on all GPUs by a formula: FLOPs per token x global batch (sequences) x sequence length (tokens).

    Raises:
        Reject: a cell that the formula needs is missing, or no number; or no formula is meant for the model.
    """
    sizes = Sizes.of(row)
    return formula(sizes) * required(row, "global_batch") * sizes.seq


def _tflops(row: Mapping[str, str], formula: Callable[[Sizes], float]) -> float | None:
    """FLOPs of a step / (step time x GPUs)."""
    try:
        step_s, gpus = positive(row, "step_time_s"), required(row, "n_gpus")
        return None if step_s is None else flops_per_step(row, formula) / (step_s * gpus * 1e12)
    except Reject:
        return None
