"""The benchmark of memory tiers at a small size."""

import json
from pathlib import Path

from benchmarks.memory_tiers import main


def test_both_tiers_are_timed_and_train_alike(tmp_path: Path) -> None:
    scale = {"samples": 6, "batch": 3, "epochs": 2, "width": 16, "tokens": 8, "rounds": 1}
    words = [word for name, value in scale.items() for word in (f"--{name}", str(value))]
    main([*words, "--folder", str(tmp_path), "--json", str(tmp_path / "out.jsonl")])
    lines = [
        json.loads(line)
        for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["config"]["tier"] for line in lines] == ["ram", "disk"]
    row = 8 * 16 * 2
    assert [line["result"]["moved_nbytes"] for line in lines] == [2 * 6 * 3 * row] * 2
    assert all(line["result"]["step_s"]["p50"] > 0 for line in lines)
