"""`python -m benchmarks.chaos`: every fault, seeded; exits with 1 if a state was lost or silent."""

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.chaos import files, kills, runs
from benchmarks.chaos.outcome import Outcome, table


def main() -> None:
    """Inject, print the table, and write every outcome as a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100, help="damaged, missing, mixed files")
    parser.add_argument("--kills", type=int, default=20, help="machines killed while they save")
    parser.add_argument("--runs", type=int, default=6, help="faults in a whole run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where every outcome goes, a JSON line each")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    start_s, outcomes = time.monotonic(), list[Outcome]()
    for suite, count in ((files, options.files), (kills, options.kills), (runs, options.runs)):
        with tempfile.TemporaryDirectory() as folder:
            outcomes += suite.inject(Path(folder), count, options.seed) if count else []
    print(table(outcomes))
    print(f"\n{len(outcomes)} faults, seed {options.seed}, {time.monotonic() - start_s:.0f} s")
    if options.out is not None:
        options.out.write_text("".join(f"{json.dumps(asdict(o))}\n" for o in outcomes))
    bad = [outcome for outcome in outcomes if outcome.verdict in ("lost", "silent")]
    for outcome in bad:
        print(f"{outcome.kind}: {outcome.verdict}: {outcome.detail}", file=sys.stderr)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
