"""Memory counted before a run against the peak that its ranks reach, and the seconds of its steps.

    python -m benchmarks.memory_count run.toml --cases small --json memory.jsonl
    python -m benchmarks.memory_count run.toml

Trains each case, a run file with other settings, on this machine with `thinpipe train`; without
cases, the file as it is. A rank's peak is that of what it alone has written to, looked at ten times
a second: without pages of files, which the system can take back, and what it shares with the server
that it was forked from. Counted is what `--dry-run`, `doctor` and the start count for that rank.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.harness import Records, command_line, format_table
from thinpipe.launch.config.run import RunConfig, load_config, write_config
from thinpipe.launch.memory.host import host_needs

_PAUSE_S = 0.1
_LORA = "model.lora={ rank = 16, alpha = 32 }"
_BF16 = 'pipeline.precision="bf16"'
CASES: dict[str, list[str]] = {
    "as it is": [],
    "all weights, AdamW": ['train.optimizer="adamw"'],
    "all weights, 8-bit AdamW": ['train.optimizer="adamw8bit"'],
    "LoRA, fp32": [_LORA, 'model.weights="fp32"'],
    **{
        f"LoRA, {form}": [_LORA, _BF16, f'model.weights="{form}"']
        for form in ("bf16", "int8", "nf4")
    },
}
GROUPS = {"small": [name for name in CASES if CASES[name]]}


def _own_and_whole_peak(pid: int) -> tuple[int, int]:
    """Bytes that a process alone has written to now, and the most that it had of any kind."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    own = sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return 1024 * own, 1024 * int(status.partition("VmHWM:")[2].split()[0])


def train(config: RunConfig, folder: Path) -> dict[str, tuple[int, int]]:
    """Peaks of each rank of a run and of the launcher, in bytes.

    Raises:
        RuntimeError: the run failed.
    """
    write_config(config, folder / "run.toml")
    command = [sys.executable, "-m", "thinpipe.launch", "train", str(folder / "run.toml")]
    with (folder / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    found: dict[str, tuple[int, int]] = {}
    try:
        while process.poll() is None:
            _sample(psutil.Process(process.pid), "launcher", found)
            for child in psutil.Process(process.pid).children(recursive=True):
                _sample(child, "", found)
            time.sleep(_PAUSE_S)
    except psutil.NoSuchProcess:
        pass  # it has ended
    finally:
        process.kill()
        code = process.wait()
    if code > 0:
        raise RuntimeError((folder / "log").read_text(encoding="utf-8"))
    return found


def _sample(process: psutil.Process, name: str, found: dict[str, tuple[int, int]]) -> None:
    try:
        kind, _, rank = process.name().partition(" ")
        if not name and not (kind == "thinpipe" and rank.isdigit()):
            return
        peaks = zip(found.get(name or rank, (0, 0)), _own_and_whole_peak(process.pid), strict=True)
        own, whole = map(max, peaks)
        found[name or rank] = own, whole
    except (psutil.NoSuchProcess, OSError, IndexError):
        return  # it has ended


def measure(run: Path, settings: Sequence[str]) -> list[dict[str, Any]]:
    """One row per rank, and one of the launcher: bytes counted and at most held, and seconds."""
    with TemporaryDirectory(dir=run.parent) as name:
        folder = Path(name)
        config = load_config(run, [*settings, f'run.folder="{folder / "run"}"'])
        started = time.time()
        peaks = train(config, folder)
        records = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in records]
    sequences = config.data.train_sequences
    assert isinstance(sequences, int), "a run file to measure says how many"
    rows = []
    for who, (own, whole) in sorted(peaks.items()):
        counted = None if who == "launcher" else host_needs(config, sequences, [int(who)]).total
        rows.append({"rank": who, "counted": counted, "peak": own, "VmHWM": whole})
    return [{**row, "started": started, "steps": steps} for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    command = command_line("benchmarks.memory_count", __doc__)
    command.add_argument("run", type=Path, help="run file, with data.train_sequences as a number")
    command.add_argument("--cases", nargs="+", choices=[*GROUPS, *CASES], default=["as it is"])
    options = command.parse_args(arguments)
    records, rows = Records(options.json), []
    for case in [case for name in options.cases for case in GROUPS.get(name, [name])]:
        for found in measure(options.run.resolve(), CASES[case]):
            records.add({"case": case}, found)
            error = f"{found['counted'] / found['peak'] - 1:+.0%}" if found["counted"] else ""
            sizes = [f"{(found[n] or 0) / 2**20:.0f}" for n in ("counted", "peak", "VmHWM")]
            rows.append([case, found["rank"], *sizes, error])
            print(" ".join(rows[-1]), flush=True)
    heads = ("case", "rank", "counted MiB", "peak MiB", "VmHWM MiB", "counted / peak")
    print(format_table(heads, rows))


if __name__ == "__main__":
    main()
