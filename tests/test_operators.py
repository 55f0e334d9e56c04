"""Operator families, FLOPs, bytes and shape keys against hand-computed values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.schema.operators import (
    Tensor,
    bytes_moved,
    collective_kind,
    family,
    flops,
    format_shapes,
    is_free,
    parse_shapes,
)

F32 = "float32"


def tensors(*shapes: tuple[int, ...], dtype: str = F32) -> list[Tensor]:
    return [Tensor(shape, dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten::mm", "matmul"),
        ("aten::addmm.out", "matmul"),
        ("aten::linear_backward", "matmul"),
        ("aten::bmm", "batched_matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_cudnn_attention_forward", "attention"),
        ("aten::convolution_backward", "convolution"),
        ("aten::native_layer_norm_backward", "normalization"),
        ("aten::_fused_rms_norm_backward", "normalization"),
        ("aten::nll_loss_forward", "softmax_loss"),
        ("aten::_log_softmax_backward_data", "softmax_loss"),
        ("aten::embedding", "embedding"),
        ("aten::embedding_dense_backward", "embedding"),
        ("aten::_index_put_impl_", "embedding"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_foreach_addcdiv_.ScalarList", "optimizer"),
        ("aten::sum.dim_IntList", "reduction"),
        ("aten::_to_copy", "copy"),
        ("aten::slice_backward", "copy"),
        ("aten::unfold_backward", "copy"),
        ("fsdp::split_with_sizes_copy", "copy"),
        ("aten::bernoulli_.float", "random"),
        ("aten::new_zeros", "fill"),
        ("aten::zero_", "fill"),
        ("aten::t", "view"),
        ("aten::_local_scalar_dense", "view"),
        ("aten::empty.memory_format", "allocation"),
        ("aten::silu_backward", "elementwise"),
        ("aten::mul_.Tensor", "elementwise"),
        ("c10d::allreduce_", "collective"),
        ("profiler::_record_function_enter_new", "view"),
        ("mylib::anything", "other"),
    ],
)
def test_family(op: str, expected: str) -> None:
    assert family(op) == expected


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("c10d::allreduce_", "all_reduce"),
        ("_c10d_functional::all_gather_into_tensor", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("c10d::recv_any_source_", "recv"),
        ("_c10d_functional::wait_tensor", ""),
        ("aten::all_reduce", ""),
    ],
)
def test_collective_kind(op: str, kind: str) -> None:
    assert collective_kind(op) == kind


def test_views_are_free_and_fills_are_not() -> None:
    assert is_free("aten::view") and is_free("aten::empty_like")
    assert not is_free("aten::zeros") and not is_free("aten::clone")
    assert bytes_moved("aten::view", tensors((1000,))) == 0


@pytest.mark.parametrize(
    ("op", "shapes", "attributes", "expected"),
    [
        ("aten::mm", [(3, 4), (4, 5)], (), 2 * 3 * 4 * 5),
        ("aten::addmm", [(5,), (3, 4), (4, 5)], (), 120),
        ("aten::linear", [(2, 3, 4), (5, 4)], (), 2 * 6 * 4 * 5),
        ("aten::bmm", [(7, 3, 4), (7, 4, 5)], (), 7 * 120),
        ("aten::baddbmm", [(7, 3, 5), (7, 3, 4), (7, 4, 5)], (), 7 * 120),
        ("aten::mv", [(3, 4), (4,)], (), 24),
        ("aten::dot", [(6,), (6,)], (), 12),
        ("aten::_grouped_mm", [(10, 4), (3, 4, 5)], (), 2 * 10 * 4 * 5),
        # scores and values: 2 x 2 b h s s d
        ("aten::_scaled_dot_product_flash_attention", [(2, 4, 8, 16)] * 3, (), 2 * 2 * 2 * 4 * 8 * 8 * 16),
        (
            "aten::_scaled_dot_product_flash_attention",
            [(2, 4, 8, 16)] * 3,
            ("causal",),
            2 * 2 * 4 * 8 * 8 * 16,
        ),
        # grouped-query attention: the work is that of the query heads
        ("aten::scaled_dot_product_attention", [(2, 4, 8, 16), (2, 1, 8, 16), (2, 1, 8, 16)], (), 32768),
        ("aten::_flash_attention_forward", [(2, 8, 4, 16)] * 3, (), 32768),
        ("aten::_scaled_dot_product_flash_attention_backward", [(2, 4, 8, 16)] * 4, (), 81920),
        ("aten::_flash_attention_backward", [(2, 8, 4, 16)] * 4, (), 81920),
        ("aten::convolution_backward", [(2, 6, 8), (2, 5, 8), (6, 5, 3)], (), 4 * (2 * 6 * 8) * 15),
        ("aten::mul", [(3, 4), (3, 4)], (), 0),
        ("aten::mm", [(3, 4)], (), 0),
    ],
)
def test_flops(op: str, shapes: list[tuple[int, ...]], attributes: tuple[str, ...], expected: int) -> None:
    assert flops(op, tensors(*shapes), (), frozenset(attributes)) == expected


def test_convolution_flops_come_from_its_output() -> None:
    assert flops("aten::convolution", tensors((2, 5, 8), (6, 5, 3)), tensors((2, 6, 8))) == 2 * 96 * 15


@pytest.mark.parametrize(
    ("op", "shapes", "outputs", "expected"),
    [
        ("aten::mul", [(3, 4), (3, 4)], [(3, 4)], 3 * 48),
        ("aten::mul", [(3, 4), (4,)], [], 48 + 16 + 48),
        ("aten::mm", [(3, 4), (4, 5)], [], 48 + 80 + 60),
        ("aten::addmm", [(5,), (3, 4), (4, 5)], [], 20 + 48 + 80 + 60),
        ("aten::linear", [(3, 4), (5, 4)], [], 48 + 80 + 60),
        ("aten::sum", [(3, 4)], [], 48),
        ("aten::zero_", [(3, 4)], [], 48),
        ("aten::zeros", [], [(3, 4)], 48),
    ],
)
def test_bytes(op: str, shapes: list[tuple[int, ...]], outputs: list[tuple[int, ...]], expected: int) -> None:
    assert bytes_moved(op, tensors(*shapes), tensors(*outputs)) == expected


def test_embedding_moves_the_gathered_rows_not_the_table() -> None:
    inputs = [Tensor((1000, 8), F32), Tensor((2, 3), "int64")]
    assert bytes_moved("aten::embedding", inputs) == 6 * 8 + 2 * 6 * 8 * 4


def test_likelihood_reads_one_score_a_row() -> None:
    assert bytes_moved("aten::nll_loss_forward", [Tensor((10, 1000), F32), Tensor((10,), "int64")]) == 80 + 40


def test_fused_adamw_reads_four_lists_and_writes_three() -> None:
    lists = [Tensor((10,), F32, group) for group in (1, 2, 3, 4)]
    assert bytes_moved("aten::_fused_adamw_", lists) == (4 + 3) * 40


def test_foreach_writes_its_first_list() -> None:
    lists = [Tensor((10,), F32, 1), Tensor((6,), F32, 1), Tensor((10,), F32, 2), Tensor((6,), F32, 2)]
    assert bytes_moved("aten::_foreach_add_.List", lists) == 128 + 64


def test_half_precision_moves_half_the_bytes() -> None:
    shapes = [(64, 64), (64, 64)]
    full = bytes_moved("aten::mm", tensors(*shapes))
    assert bytes_moved("aten::mm", tensors(*shapes, dtype="bfloat16")) * 2 == full


def test_format_shapes_by_hand() -> None:
    listed = [
        Tensor((2, 3), F32),
        Tensor((4,), F32, 1),
        Tensor((5,), F32, 1),
        Tensor((), F32),
        Tensor((7,), F32, 2),
    ]
    assert format_shapes(listed) == "2x3,[4,5],[7]"
    assert format_shapes([]) == ""


shapes = st.lists(st.integers(1, 99), min_size=1, max_size=4).map(tuple)


@given(st.lists(st.one_of(shapes, st.lists(shapes, min_size=1, max_size=3)), max_size=5))
def test_parse_inverts_format(items: list[tuple[int, ...] | list[tuple[int, ...]]]) -> None:
    given_tensors, group = [], 0
    for item in items:
        if isinstance(item, list):
            group += 1
            given_tensors += [Tensor(shape, F32, group) for shape in item]
        else:
            given_tensors.append(Tensor(item, F32))
    assert list(parse_shapes(format_shapes(given_tensors))) == given_tensors


@pytest.mark.parametrize("text", ["2xx3", "a", "[2x3", "2x3]", "[2,[3]", "x"])
def test_parse_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError):
        parse_shapes(text)
