"""Layout strings: parse(print(L)) == L, degrees that multiply out, and refusals that name the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.errors import LayoutError
from llmprof.schema.layout import AXES, OFFLOAD, PRECISIONS, RECOMPUTE, SCHEDULES, VIRTUAL, Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout that the rules allow."""
    degree = st.sampled_from([1, 2, 3, 4, 8, 16])
    dp, tp, cp = draw(degree), draw(degree), draw(degree)
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    shard = draw(st.sampled_from([0, *(d for d in range(1, dp + 1) if dp % d == 0)])) if zero else 0
    schedule = draw(st.sampled_from(SCHEDULES))
    return Layout(
        dp=dp,
        zero=zero,
        shard=shard,
        tp=tp,
        sp=draw(st.booleans()) if tp > 1 else False,
        cp=cp,
        cp_kind=draw(st.sampled_from(["ring", "ulysses"])),
        pp=(pp := draw(degree)),
        vpp=draw(degree) if schedule in VIRTUAL and pp > 1 else 1,
        ep=draw(st.sampled_from([d for d in range(1, dp * cp + 1) if dp * cp % d == 0])),
        etp=draw(st.sampled_from([0, 1, 2])),
        mb=draw(degree),
        accum=draw(degree),
        schedule=schedule,
        recompute=draw(st.sampled_from(RECOMPUTE)),
        offload=draw(st.sampled_from(OFFLOAD)),
        precision=draw(st.sampled_from(["", *PRECISIONS])),
        order="-".join(draw(st.permutations(AXES))),
    )


@given(layouts())
def test_parse_inverts_print(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(layouts())
def test_degrees_multiply_out(layout: Layout) -> None:
    assert layout.gpus == layout.dp * layout.tp * layout.pp * layout.cp
    assert layout.global_batch == layout.dp * layout.mb * layout.accum
    assert layout.dp_shard * layout.dp_replicate == layout.dp
    assert layout.zero > 0 or layout.dp_shard == 1


@given(st.text(max_size=40))
def test_any_text_is_a_layout_or_a_layout_error(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except LayoutError as error:
        assert error.message
    else:
        assert Layout.parse(str(layout)) == layout


@given(
    st.lists(st.sampled_from(["dp=2", "tp=2", "zero=3", "sp", "cp=2:ulysses", "shard=4", "ep=3"]), max_size=4)
)
def test_any_combination_is_a_layout_or_a_layout_error(parts: list[str]) -> None:
    try:
        layout = Layout.parse(",".join(parts))
    except LayoutError as error:
        assert error.message and error.exit_code == 2
    else:
        assert Layout.parse(str(layout)) == layout


def test_by_hand() -> None:
    layout = Layout.parse("dp=8, zero=3, shard=4, tp=4, sp, pp=2, mb=2, accum=16, precision=bf16")
    assert (layout.gpus, layout.global_batch) == (64, 256)
    assert (layout.dp_shard, layout.dp_replicate) == (4, 2)
    assert layout.precision == "bfloat16"
    assert str(layout) == "dp=8,zero=3,shard=4,tp=4,sp=1,pp=2,mb=2,accum=16,precision=bfloat16"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("dp=2", "zero", 0),
        ("TP=2", "tp", 2),
        ("dp=2 tp=4", "tp", 4),
        ("tp=2,sp=on", "sp", True),
        ("tp=2,sp=0", "sp", False),
        ("cp=4", "cp_kind", "ring"),
        ("cp=4:ulysses", "cp_kind", "ulysses"),
        ("schedule=GPipe", "schedule", "gpipe"),
        ("precision=fp8", "precision", "float8"),
        ("zero=3,dp=8", "dp_shard", 8),
        ("zero=1,dp=8,shard=2", "dp_replicate", 4),
    ],
)
def test_spellings(text: str, key: str, value: object) -> None:
    assert getattr(Layout.parse(text), key) == value


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "empty"),
        (" , ", "empty"),
        ("dp", "not a whole number"),
        ("dp=", "not a whole number"),
        ("dp=0", "not a positive whole number"),
        ("dp=-1", "not a whole number"),
        ("dp=2.5", "not a whole number"),
        ("dp=1e3", "not a whole number"),
        ("dp=99999999", "not a whole number"),
        ("dp=٢", "not a whole number"),
        ("dq=2", "unknown key 'dq'"),
        ("cp_kind=ring", "unknown key"),
        ("dp=2,dp=4", "given twice"),
        ("dp=2,DP=4", "given twice"),
        ("dp=2,zero=4", "zero=4 is not known"),
        ("dp=8,zero=3,shard=3", "does not divide dp=8"),
        ("dp=8,shard=4", "no meaning with zero=0"),
        ("dp=2,ep=3", "does not divide dp x cp = 2 x 1 = 2"),
        ("sp=1", "sp needs tp > 1"),
        ("tp=2,sp=maybe", "not a flag"),
        ("pp=2,vpp=2", "needs a schedule with virtual stages"),
        ("vpp=2,schedule=interleaved", "vpp=2 needs pp > 1"),
        ("schedule=dance", "schedule=dance is not known"),
        ("recompute=some", "recompute=some is not known"),
        ("offload=cloud", "offload=cloud is not known"),
        ("precision=int3", "precision=int3 is not known"),
        ("cp=2:square", "cp_kind=square is not known"),
        ("order=tp-dp", "does not name each axis once"),
        ("order=tp-tp-ep-dp-pp", "does not name each axis once"),
    ],
)
def test_refusals_name_the_rule(text: str, rule: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert rule in caught.value.message
    assert caught.value.exit_code == 2


def test_hints_say_what_to_write() -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse("schedule=dance")
    assert "1f1b" in caught.value.hint
    with pytest.raises(LayoutError) as caught:
        Layout.parse("dq=2")
    assert "dp, zero, shard, tp" in caught.value.hint
