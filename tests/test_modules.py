"""Names of modules: wrappers stripped, several roots told apart, shapes as operators see them, nothing kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from llmprof.hooks.modules import ModuleNames
from tests.models import TinyLlama


def test_names_are_fully_qualified_and_the_root_is_empty() -> None:
    model = TinyLlama(layers=2)
    names = ModuleNames()
    assert names.add(model) == ""
    assert names.add(model) == ""
    for path, module in model.named_modules():
        assert names.name(module) == path
        assert names.label(module) == (path, True)
    assert (
        names.has_children("") and names.has_children("layers.1") and names.has_children("layers.1.attention")
    )
    assert not names.has_children("out")
    assert names.known("layers.0") and not names.known("layers.7")


def test_a_module_of_no_root_has_its_class_name() -> None:
    names = ModuleNames()
    assert names.label(nn.CrossEntropyLoss()) == ("CrossEntropyLoss", False)
    assert names.name(nn.Linear(2, 2)) is None


def test_a_loss_does_not_become_the_root() -> None:
    criterion, model = nn.MSELoss(), nn.Linear(2, 2)
    names = ModuleNames()
    names.add(criterion)
    assert names.add(model) == ""
    assert names.label(criterion) == ("MSELoss", False)
    assert list(names.roots()) == [model]


def test_wrappers_leave_no_trace_in_names() -> None:
    model = TinyLlama(layers=2)
    block = model.layers[0]
    inner = [block, block.get_submodule("attention.wq")]
    model.layers[0] = checkpoint_wrapper(block)
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    names = ModuleNames()
    names.add(compiled)  # type: ignore[arg-type]
    assert [names.name(module) for module in inner] == ["layers.0", "layers.0.attention.wq"]
    assert names.name(model) == "" and names.name(model.layers[0]) == "layers.0"
    assert names.add(model) == ""


def test_a_users_attribute_called_module_stays() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 3)

    holder = Holder()
    names = ModuleNames()
    names.add(holder)
    assert names.name(holder.module) == "module"


def test_two_models_and_a_model_seen_inside_out() -> None:
    generator, first, second = nn.Sequential(nn.Linear(2, 2)), TinyLlama(layers=1), TinyLlama(layers=1)
    names = ModuleNames()
    assert names.add(generator) == ""
    assert names.add(first) == "TinyLlama"
    assert names.add(second) == "TinyLlama_2"
    assert names.name(second.get_submodule("layers.0.attention")) == "TinyLlama_2.layers.0.attention"
    outer = nn.parallel.DataParallel(generator)
    assert names.add(outer) == "" and names.name(generator[0]) == "0"


def test_shapes_are_those_of_a_module_and_what_is_below_it() -> None:
    names = ModuleNames()
    names.add(nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)))
    assert names.parameter_shapes("0") == {(4, 8), (4,)}
    assert names.parameter_shapes("1") == {(4,)}
    assert names.parameter_shapes("2") == frozenset()
    assert names.parameter_shapes() == {(4, 8), (4,)}


@pytest.mark.parametrize("keep", ["roots", "names"])
def test_no_module_is_kept_alive(keep: str) -> None:
    model = TinyLlama(layers=1)
    names = ModuleNames()
    names.add(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    if keep == "roots":
        assert list(names.roots()) == []
    else:
        assert names.known("layers.0.attention.wq")
