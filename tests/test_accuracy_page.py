"""The page of figures: what is shown, what is left out, and what changed since the committed one."""

from __future__ import annotations

from typing import Any

from benchmarks.accuracy_page import Book, percent, render_page


def make_book(**scores: Any) -> Book:
    """A book of one mode with one table."""
    table = {"table": "vendor", "n": 3, "rows": 4, "median_ape": 0.125, "skipped": {"no time": 1}, **scores}
    mode = {
        "mode": "runs, cold",
        "forecasts": 8,
        "seconds": 2.0,
        "tables": [table],
        "summary": {"n": 3, "median_ape": 0.125},
    }
    return Book(command="run it", date="2026-01-02", commit="abc1234", modes=[mode], seconds=2.5)


def row_of(page: str, name: str) -> list[str]:
    """Cells of the first table row that starts with a name."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_names_its_command_date_commit_and_speed() -> None:
    page = render_page(make_book(), None)
    assert "`run it`, 2026-01-02, commit abc1234" in page
    assert "8 forecasts, 4 per second" in page


def test_a_table_has_its_figures_and_its_reasons() -> None:
    page = render_page(make_book(spearman=0.5), None)
    assert row_of(page, "vendor") == ["vendor", "3", "4", "12.5 %"]
    assert "vendor, not scored: 1 no time" in page


def test_unknown_figures_have_no_column_and_no_zero() -> None:
    page = render_page(make_book(naive_median_ape=None), None)
    assert "naive" not in page.split("## Change")[0].split("## Runs")[1]


def test_figures_of_oom_and_low_mfu_are_read_from_inside() -> None:
    page = render_page(
        make_book(oom={"n": 7, "accuracy": 0.9}, without_below_1pct_mfu={"median_ape": 0.1}), None
    )
    assert "| vendor | 10 % | 7 | 90 % |" in " ".join(page.split())


def test_the_change_lists_what_moved_and_only_that() -> None:
    before = make_book(coverage80=0.8)._asdict() | {"commit": "old0000"}
    page = render_page(make_book(coverage80=0.8, median_ape=0.1), before)
    change = page.split("## Change")[1]
    assert "| runs, cold | vendor | median_ape | 0.125 | 0.1 |" in " ".join(change.split())
    assert "coverage80" not in change
    assert "old0000" in change


def test_no_change_says_so() -> None:
    assert "None since abc1234." in render_page(make_book(), make_book()._asdict())


def test_large_errors_are_factors() -> None:
    assert percent(0.1234) == "12.3 %"
    assert percent(9.9) == "990 %"
    assert percent(41.0) == "x42"


def test_operators_are_listed_by_device_and_family() -> None:
    book = make_book()
    row = {"table": "vendor", "key": "A card matmul", "n": 40, "median_ape": 0.05, "linear_median_ape": 0.25}
    book.modes[0]["strata"] = {"rows": [row], "mean": {"n": 1, "beats": 1, "median_ape": 0.05}}
    page = render_page(book, None)
    assert "better than every simple rule in 1 of 1" in page
    assert "| vendor | A card matmul | 40 | 5 % | | | | | | 25 % | | |" in " ".join(page.split())
