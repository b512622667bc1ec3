"""What this machine has to give, and what it does."""

import math
import os
from pathlib import Path


def free_memory() -> float:
    """Bytes that this machine can still give out; infinite where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    fields = dict(line.split(":", 1) for line in lines)
    return 1024.0 * int(fields["MemAvailable"].split()[0])


def busy_s() -> float:
    """Seconds that this machine's cores have worked since its start; 0 where it does not say."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, line.split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
