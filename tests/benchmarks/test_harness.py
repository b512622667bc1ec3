"""What benchmarks share: records that explain themselves, quantiles, tables."""

import json
from pathlib import Path

import pytest

from benchmarks.harness import Records, environment, format_table, quantiles


def test_a_record_says_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    records = Records(path)
    records.add({"bits": 3}, {"loss": 1.5})
    records.add({"bits": 4}, {"loss": 1.25})
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["config"] == {"bits": 3}
    assert second["result"] == {"loss": 1.25}
    assert set(first["environment"]) == {"revision", "versions", "hardware", "time"}
    assert first["environment"]["hardware"]["cpu"]


def test_records_of_an_earlier_run_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Records(path).add({}, {})
    with pytest.raises(ValueError, match="already holds results"):
        Records(path)


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Records(None).add({}, {})
    assert not list(tmp_path.iterdir())


def test_environment_names_torch() -> None:
    assert environment()["versions"]["torch"].startswith("2.")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], {"p20": 3.0, "p50": 3.0, "p80": 3.0}),
        ([0.0, 10.0], {"p20": 2.0, "p50": 5.0, "p80": 8.0}),
        ([5.0, 1.0, 4.0, 2.0, 3.0, 6.0], {"p20": 2.0, "p50": 3.5, "p80": 5.0}),
    ],
)
def test_quantiles_interpolate(values: list[float], expected: dict[str, float]) -> None:
    assert quantiles(values) == pytest.approx(expected)


def test_quantiles_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        quantiles([])


def test_a_table_is_aligned_markdown() -> None:
    assert format_table(["name", "MB"], [["raw", "12.5"], ["direct", "3"]]).splitlines() == [
        "| name   |   MB |",
        "|:-------|-----:|",
        "| raw    | 12.5 |",
        "| direct |    3 |",
    ]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        format_table(["name", "MB"], [["raw"]])
