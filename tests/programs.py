"""Programs that run to their end in processes of their own."""

import os
import subprocess
from pathlib import Path

from tests.waiting import PATIENCE_S


def ran(
    *words: object, code: int | None = 0, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a program printed; it ends with this exit code, if one is given."""
    done = subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done
