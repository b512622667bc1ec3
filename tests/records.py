"""Records of steps and facts of runs, for tests of what shows them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.pipeline.wire.told import DIRECTIONS, WireTotal


def step_record(step: int, **changes: Any) -> StepRecord:
    """Ordinary numbers, and `changes`."""
    values: dict[str, Any] = {
        "step": step, "epoch": 1, "loss": 10.0 / step, "tokens_per_s": 512.5, "step_s": 0.25,
        "bubble": 0.125, "wire": (), "tokens": 128, "grad_norm": 1.5, "lr": 3e-4, "skipped": False,
        "sync_bytes": 77, "control_bytes": 8, "eval": None,
    }  # fmt: skip
    return StepRecord(**(values | changes))


def wire_totals(cuts: Sequence[int], **changes: Any) -> tuple[WireTotal, ...]:
    """The same traffic in both directions of every cut."""
    values: dict[str, Any] = {"nbytes": 1000, "messages": 4, "values": 2000}
    return tuple(
        WireTotal(cut=cut, direction=way, **(values | changes))
        for cut in cuts
        for way in DIRECTIONS
    )


def run_info(cuts: Sequence[int], **changes: Any) -> RunInfo:
    """A run with AQ-SGD at these cuts, and `changes`."""
    keys = [(cut, way) for cut in cuts for way in DIRECTIONS]
    values: dict[str, Any] = {
        "name": "tiny", "folder": Path("runs/tiny"), "stages": len(cuts) + 1, "replicas": 1,
        "schedule": "InterleavedZeroBubble", "microbatches": 16, "cuts": tuple(cuts),
        "methods": {k: "aqsgd 4-bit" if k[1] == "forward" else "hadamard 4-bit" for k in keys},
        "total_steps": 10_000, "parameters": 1_300_000_000, "exchanged": 1_300_000_000,
        "machine": "2 cores", "versions": {"torch": "2.13.0"}, "config_digest": "abc123",
    }  # fmt: skip
    return RunInfo(**(values | changes))
