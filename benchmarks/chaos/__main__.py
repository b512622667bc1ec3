"""`python -m benchmarks.chaos`: every fault, seeded; exits with 1 if a state was lost or silent."""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.chaos import files, kills, live
from benchmarks.chaos.outcome import Outcome, table


def main() -> None:
    """Inject, print the table, and write every outcome as a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100, help="damaged, missing, mixed files")
    parser.add_argument("--kills", type=int, default=20, help="machines killed while they save")
    parser.add_argument("--live", type=int, default=20, help="faults in runs on emulated hosts")
    parser.add_argument(
        "--only", default="", metavar="KIND", help="live faults with this in the name"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to add outcomes to, a JSON line each")
    parser.add_argument(
        "--show", type=Path, nargs="+", metavar="FILE", help="only print tables of such files"
    )
    options = parser.parse_args()
    if options.show:
        _show([outcome for file in options.show for outcome in _read(file)])
        return
    logging.disable(logging.WARNING)
    start_s, outcomes = time.monotonic(), list[Outcome]()
    struck = partial(live.inject, only=options.only)
    suites: list[tuple[Callable[[Path, int, int], Iterable[Outcome]], int]] = [
        (files.inject, options.files),
        (kills.inject, options.kills),
        (struck, options.live),
    ]
    for inject, count in suites:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            for outcome in inject(Path(folder), count, options.seed) if count else ():
                outcomes.append(outcome)
                _write(options.out, outcome)
    bad = _show(outcomes)
    print(f"seed {options.seed}, {time.monotonic() - start_s:.0f} s")
    sys.exit(bad)


def _write(file: Path | None, outcome: Outcome) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{json.dumps(asdict(outcome))}\n")


def _read(file: Path) -> list[Outcome]:
    return [Outcome(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def _show(outcomes: Sequence[Outcome]) -> bool:
    """Print the table, then what is bad; whether anything is."""
    print(table(outcomes))
    count = sum(outcome.kind != live.END for outcome in outcomes)
    print(
        f"\n{count} faults; times are 10 % / median / 90 % / most, of fewer than 10 the least too"
    )
    bad = [outcome for outcome in outcomes if outcome.verdict in ("lost", "silent")]
    for outcome in bad:
        print(f"{outcome.kind}: {outcome.verdict}: {outcome.detail}", file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    main()
