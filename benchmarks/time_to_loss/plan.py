"""The file of losses that `thinpipe plan` knows: gaps of replicas, as they were measured.

Fine-tuning is SmolLM2's, where it was trained here, else that of `benchmarks.replicas.parity`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.time_to_loss.hours import gaps
from benchmarks.time_to_loss.tasks import METHODS

FILE = Path(__file__).parents[2] / "launch/plan/losses.json"
PARITY = Path(__file__).parents[1] / "results/replicas_gpt2_cpu_202611.jsonl"
_REPLICAS, _LR = 4, 3e-4
"""Of the rows of PARITY that count."""


def write(losses: Sequence[Mapping[str, Any]], parity: Path, file: Path) -> None:
    """Write all methods of replicas of which something is known."""
    longest = {row["task"]: row["steps"] for row in sorted(losses, key=lambda row: row["steps"])}
    known = gaps([row for row in losses if row["steps"] == longest[row["task"]]])
    tuned = _tuned(json.loads(line) for line in parity.read_text(encoding="utf-8").splitlines())
    rows = []
    for label, sections in METHODS["replicas"].items():
        method = sections["gradcomp"]["method"]
        options = sections["gradcomp"][method]
        found = {
            "fine_tuning": known.get(("smollm2", "replicas", label), (None, None))[1],
            "from_scratch": known.get(("gpt2", "replicas", label), (None, None))[1],
        }
        if found["fine_tuning"] is None:
            found["fine_tuning"] = tuned.get(_key(method, options))
        about = {name: round(gap, 4) for name, gap in found.items() if gap is not None}
        if about:
            rows.append({"method": method, "options": options, **about})
    lines = ",\n".join(json.dumps(row) for row in rows)
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _tuned(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Median gaps by method and options; of rows of one seed the newest counts."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if "method" not in row["config"]:
            continue  # of another part
        method, result, setting = row["config"]["method"], row["result"], row["config"]["setting"]
        plain = method.get("rate", 1) == 1 and not method.get("muon") and setting["name"] == "gpt2"
        if plain and (result["replicas"], result["lr"]) == (_REPLICAS, _LR):
            key = _key(method["name"], method["options"])
            found.setdefault(key, {})[result["seed"]] = result["held_out_gap"]
    return {key: median(values.values()) for key, values in found.items()}


def _key(method: str, options: Mapping[str, Any]) -> str:
    return f"{method} {json.dumps(options, sort_keys=True)}"
