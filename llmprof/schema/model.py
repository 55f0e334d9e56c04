"""The shape of a decoder: the few integers from which a Workload is built without a trace of the user's own model."""

from __future__ import annotations

import msgspec

NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rope", "learned", "alibi", "none")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer.

    Attributes:
        name: for people.
        layers: number of blocks.
        hidden: width of the residual stream.
        ffn: width of one up projection of a dense feed-forward.
        heads, kv_heads: query heads, and key-and-value heads (fewer in grouped-query attention).
        head_dim: width of one head; 0 means hidden / heads.
        vocab: rows of the embedding, as trained.
        seq: tokens in a sequence (default of a request; rows of a learned position table).
        gated: the feed-forward multiplies two up projections (SwiGLU) instead of one with GELU.
        tied: the head shares the embedding's matrix.
        bias: linear layers have biases.
        norm: one of NORMS.
        positions: one of POSITIONS.
        causal: attention looks back only.
        experts: routed experts in each mixture-of-experts block; 0 for a dense model.
        topk: routed experts that each token visits.
        expert_ffn: width of one up projection of a routed expert; 0 means `ffn`.
        shared_ffn: width of one up projection of the shared expert; 0 for none.
        dense_layers: leading blocks that are dense although `experts` is set.
    """

    name: str = ""
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 0
    vocab: int
    seq: int = 2048
    gated: bool = True
    tied: bool = False
    bias: bool = False
    norm: str = "rmsnorm"
    positions: str = "rope"
    causal: bool = True
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
