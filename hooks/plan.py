"""A model's projections become a tensor-parallel plan: the user's, the model's own, or one read from the data flow.

No layer is known by its name. Inside a block a projection whose input comes from column-parallel
projections alone is row-parallel; one that starts such a chain is column-parallel; a projection whose result
leaves the block unreduced stays replicated. Outside the blocks, lookup tables are split over their rows and
projections over their columns with a gathered result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llmprof.hooks.dataflow import Dataflow, Entry, LinearUse

COLUMN, ROW, EMBEDDING, GATHERED = "colwise", "rowwise", "embedding", "gathered"

_STYLE_NAMES = {
    "colwise": COLUMN,
    "local_colwise": COLUMN,
    "rowwise": ROW,
    "local_rowwise": ROW,
    "embedding_rowwise": EMBEDDING,
    "embedding": EMBEDDING,
    "colwise_rep": GATHERED,
    "colwise_gather_output": GATHERED,
    "gathered": GATHERED,
}
"""Roles by the style names that users and model libraries write; other styles mean replicated."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Which module is split how.

    Attributes:
        roles: "colwise", "rowwise", "embedding" or "gathered" by FQN.
        source: "user", "model" or "structure".
    """

    roles: dict[str, str]
    source: str


def find_plan(root: nn.Module, flow: Dataflow, named: Mapping[str, str] | None = None) -> TensorPlan:
    """The user's plan, else the model's own `tp_plan` or `_tp_plan`, else the one that the data flow shows.

    What a named plan leaves open outside the blocks (lookup tables, the head) is taken from the data flow.

    Args:
        root: the unsharded twin.
        flow: its data flow.
        named: style name by module name pattern ("layers.*.attention.wq": "colwise").
    """
    structural = structural_roles(flow)
    for source, plan in (("user", named), ("model", _own_plan(root))):
        roles = _matched(root, plan) if plan else {}
        if roles:
            outside = {n: r for n, r in structural.items() if r in (EMBEDDING, GATHERED) and n not in roles}
            return TensorPlan(roles=outside | roles, source=source)
    return TensorPlan(roles=structural, source="structure")


def structural_roles(flow: Dataflow) -> dict[str, str]:
    """Roles from the data flow alone."""
    roles: dict[str, str] = {name: EMBEDDING for name in flow.embeddings}
    scopes: dict[str, list[LinearUse]] = {}
    for use in flow.linears.values():
        scopes.setdefault(use.block, []).append(use)
    for block, uses in scopes.items():
        chains = _chains(uses, flow.leaks)
        roles |= chains
        if not block:
            roles |= {use.name: GATHERED for use in uses if use.name not in chains}
    return roles


def _chains(uses: list[LinearUse], leaks: frozenset[str]) -> dict[str, str]:
    """Column-parallel projections and the row-parallel ones that take up all of their results."""
    columns: set[str] = set()
    rows: dict[str, frozenset[str]] = {}
    spoiled = set(leaks)
    for use in uses:
        if use.sources and use.sources <= columns:
            rows[use.name] = use.sources
        else:
            spoiled |= use.sources & columns
            columns.add(use.name)
    while True:
        broken = {row for row, sources in rows.items() if sources & spoiled}
        consumed = {s for row, sources in rows.items() if row not in broken for s in sources}
        lost = (columns - consumed) | {s for row in broken for s in rows[row]}
        if lost <= spoiled:
            break
        spoiled |= lost
    kept = columns - spoiled
    roles = {}
    for use in uses:
        if use.name in kept:
            roles[use.name] = COLUMN
        elif use.name in rows and use.name not in broken:
            roles[use.name] = ROW
    return roles


def apply_plan(root: nn.Module, mesh: DeviceMesh, plan: TensorPlan, flow: Dataflow, *, sp: bool) -> None:
    """Shard a model in place with torch's `parallelize_module`, keeping ties.

    Args:
        root: plain model; meta, fake or real tensors.
        mesh: one-dimensional, the tensor-parallel group.
        plan, flow: of this model.
        sp: also shard what lies between the tensor-parallel regions over the sequence.
    """
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                ties.setdefault(id(parameter), []).append((module, key))
    for name, style in parallel_styles(plan, flow, sp=sp).items():
        parallelize_module(root.get_submodule(name), mesh, style)
    for (first, key), *others in ties.values():
        for module, other in others:
            if _same_placement(module._parameters[other], first._parameters[key]):
                module._parameters[other] = first._parameters[key]


def parallel_styles(plan: TensorPlan, flow: Dataflow, *, sp: bool) -> dict[str, ParallelStyle]:
    """torch's parallel style of every module that the plan touches, by FQN."""
    outside: Any = Shard(1) if sp else Replicate()
    prepared = _entries(plan, flow)
    styles: dict[str, ParallelStyle] = {}
    for name, role in plan.roles.items():
        use = flow.linears.get(name)
        if role == COLUMN:
            inside = use is not None and use.entry is not None and use.entry.module in prepared
            styles[name] = ColwiseParallel() if inside else ColwiseParallel(input_layouts=outside)
        elif role == ROW:
            styles[name] = RowwiseParallel(output_layouts=outside)
        elif role == EMBEDDING:
            rank = flow.embeddings.get(name, 3)
            layout: Any = Shard(max(rank - 2, 0)) if sp else Replicate()
            styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
        elif role == GATHERED:
            late = use is not None and use.after_blocks
            sequence = sp and use is not None and use.input_rank == 3
            styles[name] = ColwiseParallel(
                input_layouts=Shard(1) if sequence and late else Replicate(),
                output_layouts=Shard(1) if sequence and not late else Replicate(),
            )
    if sp:
        columns = {name for name, role in plan.roles.items() if role == COLUMN}
        styles |= {
            n: SequenceParallel(use_local_output=True) for n, s in flow.norms.items() if not s & columns
        }
    for name, entry in prepared.items():
        styles[name] = _prepare_input(entry, outside)
    return styles


def _entries(plan: TensorPlan, flow: Dataflow) -> dict[str, Entry]:
    """Modules that hold several column-parallel projections of one argument: it is gathered (reduced) once for all."""
    entries = [
        use.entry
        for name, use in flow.linears.items()
        if plan.roles.get(name) == COLUMN and use.entry is not None
    ]
    counts = Counter((e.module, e.position, e.keyword) for e in entries)
    modules = Counter(module for module, _, _ in counts)
    return {
        e.module: e for e in entries if counts[e.module, e.position, e.keyword] > 1 and modules[e.module] == 1
    }


def _prepare_input(entry: Entry, outside: Any) -> PrepareModuleInput:
    if entry.position is None:
        return PrepareModuleInput(
            input_kwarg_layouts={entry.keyword: outside},
            desired_input_kwarg_layouts={entry.keyword: Replicate()},
        )
    given = tuple(outside if i == entry.position else None for i in range(entry.num_args))
    wanted = tuple(Replicate() if i == entry.position else None for i in range(entry.num_args))
    return PrepareModuleInput(input_layouts=given, desired_input_layouts=wanted)


def indivisible(plan: TensorPlan, flow: Dataflow, tp: int) -> str:
    """Why a degree cannot split the blocks' projections evenly, "" when it can."""
    for name, role in plan.roles.items():
        use = flow.linears.get(name)
        if use is None or role not in (COLUMN, ROW):
            continue
        size = use.out_features if role == COLUMN else use.in_features
        if size % tp:
            return f"{name} has {size} features, which tp={tp} does not divide"
        parent = name.rpartition(".")[0]
        _, head_dim = flow.heads.get(parent, (0, 0))
        if role == COLUMN and head_dim and size % head_dim == 0 and (size // head_dim) % tp:
            return f"{name} has {size // head_dim} heads, which tp={tp} does not divide"
    return ""


def _own_plan(root: nn.Module) -> Mapping[str, str] | None:
    for attribute in ("tp_plan", "_tp_plan"):
        plan = getattr(root, attribute, None)
        if isinstance(plan, Mapping) and plan:
            return plan
    return None


def _matched(root: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Roles of the modules whose names match a pattern; an embedding that is named "rowwise" is a lookup table."""
    roles = {}
    for name, module in root.named_modules():
        for pattern, style in plan.items():
            role = _STYLE_NAMES.get(str(style))
            if role and fnmatch(name, pattern) and isinstance(module, (nn.Linear, nn.Embedding)):
                roles[name] = EMBEDDING if isinstance(module, nn.Embedding) else role
    return roles


def _same_placement(a: Any, b: Any) -> bool:
    return a is not b and getattr(a, "placements", None) == getattr(b, "placements", None)
