"""What this machine has to give."""

import math
from pathlib import Path


def free_memory() -> float:
    """Bytes that this machine can still give out; infinite where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    fields = dict(line.split(":", 1) for line in lines)
    return 1024.0 * int(fields["MemAvailable"].split()[0])
