"""Collective tables: rows become groups on a machine, and fitted ones a sweep that prices the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmprof.errors import TableError
from llmprof.judge.collectives import score_collectives
from llmprof.judge.splits import Fit
from llmprof.judge.table import Table, read_table
from tests.made_up import PUBLISHED, needs_published


def table(rows: list[dict[str, str]]) -> Table:
    return Table(name="made_up", kind="collectives", columns=tuple(rows[0]), rows=rows)


def collectives() -> list[dict[str, str]]:
    """All-reduces over 8 devices of one node at a bus bandwidth of 200 GB/s after 20 us, and one over two nodes."""
    base = {
        "gpu": "A100-SXM4-80GB",
        "op": "all_reduce",
        "qc": "ok",
        "n_gpus": "8",
        "n_nodes": "1",
        "gpus_per_node": "8",
    }
    rows = [
        base | {"row_id": f"c{e}", "size_bytes": str(1 << e), "time_us": repr(20 + 1.75 * (1 << e) / 200e3)}
        for e in range(12, 32)
    ]
    return [
        *rows,
        base | {"row_id": "two", "n_gpus": "16", "n_nodes": "2", "size_bytes": "1000000", "time_us": "90"},
    ]


def test_a_sweep_prices_the_sizes_between() -> None:
    cold = score_collectives(table(collectives()))
    fitted = score_collectives(table(collectives()), fit=Fit("random", 0.5))
    assert sum(r.scored for r in cold.rows) == 21
    assert fitted.extra["median_ape"] < cold.extra["median_ape"]
    nodes = score_collectives(table(collectives()), fit=Fit("nodes", 1))
    assert [r.row_id for r in nodes.rows if r.scored] == ["two"]


def predicted(row: dict[str, str]) -> float:
    (scored,) = score_collectives(table([row])).rows
    assert scored.predicted_p50 is not None, scored.reason
    return scored.predicted_p50


def test_a_group_spans_the_nodes_it_is_spread_over() -> None:
    """Two devices of one node talk over its own links, two of different nodes over the network."""
    pair = collectives()[-2] | {"n_gpus": "2", "gpus_per_node": "2"}
    assert predicted(pair | {"n_nodes": "2", "gpus_per_node": "1"}) > 5 * predicted(pair)
    # four members in each of two nodes share four rails; two members in each share two
    four = collectives()[-2] | {"n_gpus": "8", "n_nodes": "2", "gpus_per_node": "4"}
    two = four | {"n_gpus": "4", "gpus_per_node": "2"}
    assert predicted(four) < predicted(two)


def test_the_link_cell_says_what_joins_a_pair() -> None:
    row = collectives()[-2] | {"gpu": "A40-48GB", "n_gpus": "4", "gpus_per_node": "4"}
    assert predicted(row | {"link": "PCIe"}) >= predicted(row)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"qc": "slow fabric: sockets"}, "qc: slow fabric"),
        ({"gpu": "unstated (8-GPU node)", "qc": "gpu unstated"}, "unknown device: unstated (8-GPU node)"),
        ({"op": "shuffle"}, "not a collective that is priced: shuffle"),
        ({"n_gpus": "1"}, "one GPU moves nothing: n_gpus=1"),
        ({"size_bytes": ""}, "empty cell: size_bytes"),
        ({"time_us": ""}, "no time"),
    ],
)
def test_reasons(change: dict[str, str], reason: str) -> None:
    (row,) = score_collectives(table([collectives()[0] | change])).rows
    assert row.reason == reason


def test_remarks_of_where_a_figure_comes_from_do_not_drop_it() -> None:
    (row,) = score_collectives(table([collectives()[0] | {"qc": "size convention as logged"}])).rows
    assert row.scored


def test_the_naive_forecast_takes_the_rate_of_the_largest_fitted_message() -> None:
    scored = score_collectives(table(collectives()[:-1]), fit=Fit("smaller", 0.5))
    last = scored.rows[-1]
    share = 1.75 * 2**21 / 300e3 / (20 + 1.75 * 2**21 / 200e3)  # of 300 GB/s, at 2 MiB
    assert last.naive == pytest.approx(1.75 * 2**31 / 300e3 / share)


@needs_published
@pytest.mark.parametrize("path", sorted((PUBLISHED / "collectives").glob("*.csv")), ids=lambda p: p.stem)
def test_published_collectives_are_read(path: Path) -> None:
    try:
        found = read_table(path)
    except TableError:
        pytest.skip("no table of collectives")
    scored = score_collectives(found)
    assert not scored.defects
    assert sum(r.scored for r in scored.rows) == scored.countable
