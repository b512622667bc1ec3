"""Three hundred mistakes: each is named with its remedy, with exit code 2 and no traceback."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mistakes.folder import write_good
from tests.commands import Command

ANSWERS = Path(__file__).parents[2] / "benchmarks/mistakes/answers.jsonl"
MISTAKES: list[dict[str, Any]] = [
    json.loads(line) for line in ANSWERS.read_text(encoding="utf-8").splitlines()
]
NEED_A_RUN = ("runs/done",)


def problem(mistake: dict[str, Any], folder: Path) -> str | None:
    """What is wrong with the answer."""
    folder.mkdir()
    write_good(folder)
    for name, text in mistake.get("files", {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        environment = {"COLUMNS": "200", **mistake.get("environment", {})}
        done = Command(*shlex.split(mistake["command"]), environment=environment).done()
    said = done.stderr.replace(str(folder), ".")
    missing = [words for words in mistake["words"] if words not in said]
    if done.returncode == 2 and not missing and "Traceback" not in said:
        return None
    return f"{mistake['command']} {mistake.get('files', '')}: exit {done.returncode}: {said}"


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted({mistake["group"] for mistake in MISTAKES}))
def test_every_mistake_is_answered(tmp_path: Path, group: str) -> None:
    chosen = [
        mistake
        for mistake in MISTAKES
        if mistake["group"] == group and not any(run in str(mistake) for run in NEED_A_RUN)
    ]
    problems = [problem(mistake, tmp_path / str(n)) for n, mistake in enumerate(chosen)]
    assert [*filter(None, problems)] == []


def test_one_mistake_of_each_kind_is_answered(tmp_path: Path) -> None:
    """For each change; all of them are for the slow run."""
    found = {mistake["group"]: mistake for mistake in reversed(MISTAKES)}
    problems = [problem(mistake, tmp_path / group) for group, mistake in found.items()]
    assert [*filter(None, problems)] == []
    assert len(MISTAKES) >= 300
