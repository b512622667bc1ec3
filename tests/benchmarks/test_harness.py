"""What benchmarks share: records that explain themselves, quantiles, tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity import convergence
from benchmarks.harness import (
    Records,
    Row,
    environment,
    format_table,
    quantiles,
    read_results,
    summary,
    with_baseline,
    with_gaps,
)
from benchmarks.kernels import __main__ as kernels
from benchmarks.links import __main__ as links
from benchmarks.replicas import parity

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_a_record_says_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    records = Records(path)
    records.add({"bits": 3}, {"loss": 1.5})
    records.add({"bits": 4}, {"loss": 1.25})
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert first["config"] == {"bits": 3}
    assert second["result"] == {"loss": 1.25}
    assert set(first["environment"]) == {"revision", "versions", "hardware", "time"}
    assert first["environment"]["hardware"]["cpu"]


def test_records_of_an_earlier_run_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Records(path).add({}, {})
    with pytest.raises(ValueError, match="already holds results"):
        Records(path)


def test_a_benchmark_of_several_sittings_goes_on_and_may_replace_results(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for part in ("losses", "hours"):
        Records(path, go_on=True).add({}, {"part": part})
    records = Records(path, go_on=True)
    assert records.results == [{"part": "losses"}, {"part": "hours"}]
    records.keep(lambda row: row["part"] != "hours")
    records.add({}, {"part": "hours", "new": True})
    assert read_results(path) == records.results == [{"part": "losses"}, records.results[1]]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.name)
def test_recorded_results_have_one_schema(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        assert json.loads(line).keys() == {"config", "environment", "result"}


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


def test_quantiles_of_nothing_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least one"):
        quantiles([])


def test_a_table_is_aligned_markdown() -> None:
    assert format_table(["name", "MB"], [["raw", "12.5"], ["direct", "3"]]).splitlines() == [
        "| name   |   MB |",
        "|:-------|-----:|",
        "| raw    | 12.5 |",
        "| direct |    3 |",
    ]


def test_a_row_of_another_length_is_rejected() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        format_table(["name", "MB"], [["raw"]])


def row(method: str, seed: int, loss: float, **conditions: Any) -> Row:
    return Row(method, {"loss": loss, "bytes": 1e6, "score": None}, conditions, seed)


def test_gaps_are_to_the_baseline_of_the_same_conditions_and_seed(tmp_path: Path) -> None:
    path, rows = tmp_path / "rows.jsonl", list[Row]()
    records = Records(path)
    for lr, seed, base in ((1, 0, 3.0), (1, 1, 4.0), (2, 0, 5.0)):
        for method, above in (("fp32", 0.0), ("x", 0.25 * (1 + seed))):
            found = row(method, seed, base + above, lr=lr)
            rows.append(with_gaps(found, rows, "fp32", ["loss", "score"]))
            records.add({}, rows[-1])
    assert [each.numbers["loss gap"] for each in rows] == [0, 0.25, 0, 0.5, 0, 0.25]
    assert rows[1].numbers["score gap"] is None
    assert [Row(**result) for result in read_results(path)] == rows
    columns = {"loss": ".1f", "loss gap": "+.2f", "score": ".3f"}
    assert summary(rows, columns).splitlines()[2:] == [
        "| fp32   |  1 |     2 |  3.5 |                  +0.00 |",
        "| x      |  1 |     2 |  3.9 | +0.38 (+0.25 to +0.50) |",
        "| fp32   |  2 |     1 |  5.0 |                  +0.00 |",
        "| x      |  2 |     1 |  5.2 |                  +0.25 |",
    ]


def test_what_all_are_compared_with_is_measured_too_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert with_baseline(["b", "a"], "a") == ["a", "b"]
    assert not capsys.readouterr().out
    assert with_baseline(["b", "b"], "a") == ["a", "b"]
    assert capsys.readouterr().out == "a is measured too: the others are compared with it\n"


@pytest.mark.parametrize(
    ("parser", "first", "switch", "given"),
    [
        (convergence, ["--train", "a", "--eval", "b"], "quick", {"methods": ["bf16"], "epochs": 9}),
        (parity, ["--text", "a", "b"], "quick", {"methods": [parity.BASELINE], "seeds": 2}),
        (kernels, [], "quick", {"bits": [2], "repetitions": 7}),
        (links, [], "full", {"stages": [3], "delays": ["1ms"]}),
    ],
)
def test_a_switch_changes_defaults_and_nothing_that_was_given(
    parser: Any,
    first: list[str],
    switch: str,
    given: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And says what it stands for."""
    parse = getattr(parser, "_parse", None) or getattr(parser, "_arguments", None) or parser.parse
    plain, switched = (vars(parse([*first, *more])) for more in ([], [f"--{switch}"]))
    changed = {name for name in plain if plain[name] != switched[name]} - {switch}
    assert changed >= set(given)
    said = capsys.readouterr().out
    assert all(f"--{switch}: {name} = " in said for name in changed)
    beside = [f"--{switch}"]
    for name, value in given.items():
        beside += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    found = vars(parse([*first, *beside]))
    assert found == {**switched, **given}
