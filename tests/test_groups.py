"""Which group a collective belongs to, and how many bytes it moves, from meshes, shapes and NCCL's metadata."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmprof.hooks.calls import Call, Owner
from llmprof.hooks.groups import Groups
from llmprof.hooks.meshes import axis_of_name, computed_shape
from llmprof.hooks.modules import ModuleNames
from llmprof.schema.operators import Tensor


@pytest.fixture
def world() -> Iterator[None]:
    """Rank 3 of 16 in a process group that does nothing."""
    dist.init_process_group("fake", rank=3, world_size=16, store=FakeStore())
    yield
    dist.destroy_process_group()


def call(op: str, kind: str, *shapes: tuple[int, ...], **more: object) -> Call:
    inputs = tuple(Tensor(shape, "bfloat16") for shape in shapes)
    values = {"op": op, "kind": kind, "inputs": inputs, "owner": Owner(""), "phase": "communication"}
    return Call(**(values | {"thread": 1, "start_us": 0.0, "duration_us": 1.0} | more))  # type: ignore[arg-type]


def test_without_a_process_group_there_is_one_rank() -> None:
    assert Groups.of([nn.Linear(2, 2)]) == Groups()


@pytest.mark.usefixtures("world")
def test_hybrid_sharding_with_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False))
    parallelize_module(model[0], mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
    groups = Groups.of([model])
    assert groups.axes == {"dp": 4, "tp": 4} and groups.data_parallel and groups.world_size == 16
    assert computed_shape(model.get_parameter("0.weight"), fully_sharded=True) == (16, 8)
    assert computed_shape(model.get_parameter("1.weight"), fully_sharded=True) == (64, 8)[::-1]
    names = ModuleNames()
    names.add(model)
    assert names.parameter_shapes("0") == {(16, 8)}

    gather = groups.message(call("c10d::_allgather_base_", "all_gather", (512,), (256,), fsdp=True))
    assert (gather.axis, gather.group_size, gather.size_bytes) == ("dp", 2, 1024)
    reduced = groups.message(call("_c10d_functional::all_reduce", "all_reduce", (6, 8)))
    assert (reduced.axis, reduced.group_size, reduced.size_bytes) == ("tp", 4, 96)
    functional = call("_c10d_functional::all_gather_into_tensor", "all_gather", (6, 8), scalars=(4,))
    message = groups.message(functional)
    assert (message.axis, message.group_size, message.size_bytes) == ("tp", 4, 4 * 96)
    scattered = call("_c10d_functional::reduce_scatter_tensor", "reduce_scatter", (24, 8), scalars=(4,))
    assert groups.message(scattered).size_bytes == 24 * 8 * 2


@pytest.mark.usefixtures("world")
def test_a_mesh_without_names() -> None:
    mesh = init_device_mesh("cpu", (16,))
    split = nn.Sequential(nn.Linear(8, 64, bias=False))
    parallelize_module(split[0], mesh, ColwiseParallel())
    assert Groups.of([split]).axes == {"tp": 16}
    sharded = nn.Linear(64, 32, bias=False)
    fully_shard(sharded, mesh=mesh)
    assert Groups.of([sharded]).axes == {"dp": 16}
    assert computed_shape(sharded.weight, fully_sharded=True) == (32, 64)


@pytest.mark.usefixtures("world")
def test_what_is_not_known_stays_unknown() -> None:
    mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("rows", "columns"))
    model = nn.Linear(16, 16, bias=False)
    model.weight = nn.Parameter(torch.distributed.tensor.DTensor.from_local(torch.zeros(4, 4), mesh))
    groups = Groups.of([model])
    message = groups.message(call("_c10d_functional::all_reduce", "all_reduce", (6, 8)))
    assert (message.axis, message.group_size) == ("", 0)
    plain = Groups.of([nn.Linear(2, 2)])
    assert plain.message(call("c10d::allreduce_", "all_reduce", (4,))).axis == ""


def test_metadata_of_the_backend_wins() -> None:
    told = {
        "Group size": "8",
        "Process Group Description": "mesh_tp",
        "In msg nelems": "100",
        "Out msg nelems": "800",
        "dtype": "Float",
    }
    message = Groups().message(call("c10d::_allgather_base_", "all_gather", metadata=tuple(told.items())))
    assert (message.axis, message.group_size, message.size_bytes, message.dtype) == ("tp", 8, 3200, "float32")
    broken = (("Group size", "8"), ("In msg nelems", "many"), ("Out msg nelems", "800"))
    assert Groups().message(call("c10d::allreduce_", "all_reduce", (3,), metadata=broken)).size_bytes == 6


@pytest.mark.parametrize(
    ("name", "axis"), [("dp_shard", "dp"), ("FSDP", "dp"), ("tp", "tp"), ("stage", "pp"), ("rows", "")]
)
def test_usual_names_of_mesh_dimensions(name: str, axis: str) -> None:
    assert axis_of_name(name) == axis
