"""Blocks of decoders written by hand as a trace would show them, in bfloat16, with the order of operators that
different programs use: expectations about fused kernels fit on paper."""

from __future__ import annotations

from llmprof.schema.workload import (
    ClassTrace,
    Dim,
    LayerSpec,
    LayerTrace,
    OpSpec,
    Poly,
    TensorSpec,
    Workload,
)

B, S, TOKENS = Poly(cb=1), Poly(cs=1), Poly(cbs=1)


def t(*dims: Dim, dtype: str = "bfloat16") -> TensorSpec:
    """A bfloat16 tensor."""
    return TensorSpec(tuple(dims), dtype)


class Recorder:
    """Collects operators in program order."""

    def __init__(self) -> None:
        self.ops: list[OpSpec] = []
        self.module = ""
        self.phase = "forward"

    def add(self, name: str, inputs: list[TensorSpec], *outputs: TensorSpec) -> None:
        """One operator of the module that runs now."""
        self.ops.append(
            OpSpec(
                op=f"aten::{name}",
                phase=self.phase,
                module=self.module,
                inputs=tuple(inputs),
                outputs=outputs,
                attributes=("causal",) if "scaled_dot" in name else (),
            )
        )

    def linear(self, module: str, inside: int, outside: int) -> None:
        """A projection without bias, forward; its backward is added by `linear_backward`."""
        self.module = module
        self.add("t", [t(outside, inside)], t(inside, outside))
        self.add("view", [t(B, S, inside)], t(TOKENS, inside))
        self.add("mm", [t(TOKENS, inside), t(inside, outside)], t(TOKENS, outside))
        self.add("_unsafe_view", [t(TOKENS, outside)], t(B, S, outside))

    def linear_backward(self, module: str, inside: int, outside: int, *, shared: bool = False) -> None:
        """Gradients of weight and input; `shared`: the input's is added to another projection's."""
        self.module, self.phase = module, "backward_weight"
        self.add("mm", [t(outside, TOKENS), t(TOKENS, inside)], t(outside, inside))
        self.phase = "backward_input"
        self.add("mm", [t(TOKENS, outside), t(outside, inside)], t(TOKENS, inside))
        if shared:
            self.add("add_", [t(B, S, inside), t(B, S, inside)], t(B, S, inside))

    def rms_norm(self, module: str, hidden: int) -> None:
        """As Hugging Face writes it: statistics and scaling in float32."""
        x, wide = t(B, S, hidden), t(B, S, hidden, dtype="float32")
        one = t(B, S, 1, dtype="float32")
        self.module = module
        self.add("_to_copy", [x], wide)
        self.add("pow", [wide], wide)
        self.add("mean", [wide], one)
        self.add("add", [one], one)
        self.add("rsqrt", [one], one)
        self.add("mul", [wide, one], wide)
        self.add("_to_copy", [wide], x)
        self.add("mul", [t(hidden), x], x)

    def rope(self, heads: int, width: int) -> None:
        """q * cos + rotate_half(q) * sin."""
        x, half = t(B, heads, S, width), t(B, heads, S, width // 2)
        table = t(1, 1, S, width)
        self.add("mul", [x, table], x)
        self.add("slice", [x], half)
        self.add("slice", [x], half)
        self.add("neg", [half], half)
        self.add("cat", [half, half], x)
        self.add("mul", [x, table], x)
        self.add("add", [x, x], x)

    def elementwise_backward(self, module: str, count: int, spec: TensorSpec) -> None:
        """What eager autograd runs for a chain of elementwise operators."""
        self.module, self.phase = module, "backward_input"
        for _ in range(count):
            self.add("mul", [spec, spec], spec)


def llama_block(*, hidden: int, ffn: int, heads: int, kv_heads: int) -> LayerTrace:
    """A Llama block in the order of Hugging Face: the three projections first, then both ropes."""
    r, d = Recorder(), hidden // heads
    x, q, kv = t(B, S, hidden), t(B, heads, S, d), t(B, kv_heads, S, d)
    wide, lse = t(B, S, ffn), t(B, heads, S, dtype="float32")
    r.rms_norm("norm1", hidden)
    for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        r.linear(f"attn.{name}", hidden, n * d)
        r.module = "attn"
        r.add("view", [t(B, S, n * d)], t(B, S, n, d))
        r.add("transpose", [t(B, S, n, d)], t(B, n, S, d))
    r.rope(heads, d)
    r.rope(kv_heads, d)
    r.add("_scaled_dot_product_flash_attention", [q, kv, kv], q, lse)
    r.add("transpose", [q], t(B, S, heads, d))
    r.add("view", [t(B, S, heads, d)], x)
    r.linear("attn.o", hidden, hidden)
    r.module = ""
    r.add("add", [x, x], x)
    r.rms_norm("norm2", hidden)
    r.linear("mlp.gate", hidden, ffn)
    r.module = "mlp"
    r.add("silu", [wide], wide)
    r.linear("mlp.up", hidden, ffn)
    r.module = "mlp"
    r.add("mul", [wide, wide], wide)
    r.linear("mlp.down", ffn, hidden)
    r.module = ""
    r.add("add", [x, x], x)
    r.linear_backward("mlp.down", ffn, hidden)
    r.elementwise_backward("mlp", 4, wide)
    r.linear_backward("mlp.up", hidden, ffn)
    r.linear_backward("mlp.gate", hidden, ffn, shared=True)
    r.elementwise_backward("norm2", 12, x)
    r.linear_backward("attn.o", hidden, hidden)
    r.module = "attn"
    r.add("_scaled_dot_product_flash_attention_backward", [q, q, kv, kv, q, lse], q, kv, kv)
    r.elementwise_backward("attn", 8, q)
    for name, n in (("v", kv_heads), ("k", kv_heads), ("q", heads)):
        r.linear_backward(f"attn.{name}", hidden, n * d, shared=name != "v")
    r.elementwise_backward("norm1", 12, x)
    return LayerTrace(ops=tuple(r.ops), saved=(x,) * 100, boundary=x)


def gpt_block(*, hidden: int, heads: int) -> LayerTrace:
    """A GPT block with biases, dropout and attention written out, as in "Reducing Activation Recomputation"."""
    r, d, h = Recorder(), hidden // heads, hidden
    x, mask, four = t(B, S, h), t(B, S, h, dtype="bool"), t(B, S, 4 * h)
    rows = t(Poly(cb=heads), S, d)
    scores, kept = t(Poly(cb=heads), S, S), t(Poly(cb=heads), S, S, dtype="bool")
    statistic = t(B, S, 1, dtype="float32")

    def biased(module: str, inside: int, outside: int) -> None:
        r.module = module
        r.add("view", [t(B, S, inside)], t(TOKENS, inside))
        r.add("addmm", [t(outside), t(TOKENS, inside), t(inside, outside)], t(TOKENS, outside))
        r.add("view", [t(TOKENS, outside)], t(B, S, outside))

    r.module = "norm1"
    r.add("native_layer_norm", [x, t(h), t(h)], x, statistic, statistic)
    biased("attn.qkv", h, 3 * h)
    r.module = "attn"
    r.add("split", [t(B, S, 3 * h)], x, x, x)
    r.add("bmm", [rows, t(Poly(cb=heads), d, S)], scores)
    r.add("mul", [scores], scores)
    r.add("add", [scores, t(S, S)], scores)
    r.add("_softmax", [scores], scores)
    r.add("native_dropout", [scores], scores, kept)
    r.add("bmm", [scores, rows], rows)
    r.add("clone", [t(B, S, heads, d)], t(B, S, heads, d))
    biased("attn.proj", h, h)
    r.module = ""
    r.add("native_dropout", [x], x, mask)
    r.add("add", [x, x], x)
    r.module = "norm2"
    r.add("native_layer_norm", [x, t(h), t(h)], x, statistic, statistic)
    biased("mlp.up", h, 4 * h)
    r.module = "mlp"
    r.add("gelu", [four], four)
    biased("mlp.down", 4 * h, h)
    r.module = ""
    r.add("native_dropout", [x], x, mask)
    r.add("add", [x, x], x)
    r.elementwise_backward("", 40, scores)
    return LayerTrace(ops=tuple(r.ops), saved=(scores,) * 100, boundary=x)


def one_layer(layer: LayerTrace) -> Workload:
    """A workload of one block."""
    return Workload(
        name="one block",
        layers=(LayerSpec(name="block0", kind="block", module="layers.0"),),
        sequence=(("block0", 1),),
        classes=(ClassTrace(layers={"block0": layer}),),
        precision="bfloat16",
    )
