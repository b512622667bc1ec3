"""The live panel fits the terminal it is drawn on."""

import itertools
import math
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.records import run_info, step_record
from thinpipe.launch.host.words import WireKey, format_bytes
from thinpipe.launch.view.report.edge_trace import EdgeTrace
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.terminal.panel import LivePanel
from thinpipe.launch.view.terminal.progress import RunningValues
from thinpipe.pipeline.wire.told import DIRECTIONS, WireTotal

EVALUATION = {"loss": 2.1234, "loss_compressed": 2.1299, "accuracy": 0.815}


def info(stages: int, *, shards: int = 1, mixed: bool = False) -> RunInfo:
    cuts = tuple(range(3, 3 * stages, 3))
    keys: list[WireKey] = list(itertools.product(cuts, DIRECTIONS))
    named = {"forward": "aqsgd 4-bit", "backward": "hadamard 4-bit"}
    methods = {key: named[key[1]] for key in keys}
    if mixed:
        methods[cuts[0], "forward"] = "transform 2-bit"
    return run_info(
        cuts, name="gpt2-xl-over-200-mbit", replicas=8, methods=methods, exchanged=2_400_000,
        shards=shards,
    )  # fmt: skip


def record(run: RunInfo) -> StepRecord:
    """Every number in it is a different one."""
    wire = tuple(
        WireTotal(cut=cut, direction=way, nbytes=101_000_000 + 7_000_000 * number, messages=16,
                  values=10**9, channel_error=0.0421)
        for number, (cut, way) in enumerate(itertools.product(run.cuts, DIRECTIONS))
    )  # fmt: skip
    shards = {"weight_bytes": 811_000_000, "gradient_bytes": 822_000_000} if run.shards > 1 else {}
    return step_record(
        4321, epoch=12, loss=2.5432, tokens_per_s=123_456.7, step_s=83.0, bubble=0.256,
        wire=wire, tokens=65_536, grad_norm=12_345.0, lr=3.21e-4, skipped=False,
        sync_bytes=933_000_000, control_bytes=876, eval=EVALUATION, **shards,
    )  # fmt: skip


def trace(connections: int, *, busy: int | None = None) -> EdgeTrace:
    """Every connection has rates of its own; or only those with the first `busy` are used."""

    def links(second: int) -> dict[str, dict[str, float]]:
        found = {}
        for n in range(1, connections + 1):
            rates = (1e6 * (20 + n), 1e6 * (40 + n))
            if busy is not None:
                rates = (1e8, 2e8) if n <= busy else (1e3, 1e3)
            found[f"host{n}"] = {
                "sent_nbytes": second * rates[0], "received_nbytes": second * rates[1],
                "round_trip_s": 0.05 + n / 1000, "retransmitted": 0, "resumed": 0,
                "silence_s": 4.0 if n == 1 else 0.0,
            }  # fmt: skip
        return found

    made = EdgeTrace(lambda: None)
    for second in (0, 1):
        made.add({"name": "host0", "links": links(second)}, float(second))
    return made


def drawn(
    run: RunInfo, size: tuple[int, int], connections: int | EdgeTrace = 0, steps: int = 1
) -> list[str]:
    if isinstance(connections, int):
        connections = trace(connections)
    console = Console(width=size[0], height=size[1], force_terminal=True, color_system=None)
    values = RunningValues()
    panel = LivePanel(run, console, values, connections)
    for _ in range(steps):
        values.update(record(run))
        values.eval = EVALUATION
        panel.step(record(run))
    with console.capture() as shown:
        console.print(panel.frame(), end="")
    lines = shown.get().splitlines()
    return lines[:-1] if not lines[-1].strip() else lines


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@pytest.mark.parametrize("connections", [0, 3])
@pytest.mark.parametrize("run", [info(1), info(8), info(8, mixed=True)])
def test_everything_fits(run: RunInfo, size: tuple[int, int], connections: int) -> None:
    lines = drawn(run, size, connections)
    text = "\n".join(lines)
    assert len(lines) <= size[1]
    assert [line for line in lines if cell_len(line) != size[0]] == []
    assert "…" not in text
    words = " ".join(line.strip("│ ") for line in lines)
    shown = [
        "step 4321/10000", "43 %", "elapsed,", "left", "2.5432", "2.1234", "2.1299", "0.815",
        "123,457", "25.6 %", "1 min 23 s", "1.23e+04", "3.21e-04", "933 MB", "876 B",
        "8 replicas", "InterleavedZeroBubble", "16 microbatches", "(2.40 M trained)",
        *(format_bytes(count.nbytes) for count in record(run).wire),
        *(f"host{number}" for number in range(connections + 1) if connections),
        *(f"{8.0 * (base + n):.1f}" for n in range(1, connections + 1) for base in (20, 40)),
        *(["silent 4 s"] if connections else []),
        *{*run.methods.values()},
    ]  # fmt: skip
    missing = [part for part in shown if part not in words]
    assert missing == []


def test_eight_machines_with_shards_still_fit_the_smallest() -> None:
    lines = drawn(info(8, shards=2), (80, 24), connections=7)
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert all(f"host{number}" in text for number in range(8))
    assert "811 MB" in text


@pytest.mark.parametrize("busy", [False, True])
def test_of_many_connections_some_are_counted_only(busy: bool) -> None:
    """Those that are used come first, and every other one is in the number left."""
    own = trace(19, busy=19 if busy else 2)
    lines = drawn(info(8), (80, 24), own)
    text = "\n".join(lines)
    assert len(lines) <= 24
    assert [line for line in lines if cell_len(line) != 80] == []
    shown = set(re.findall(r"host0 \S+→ ←\S+ (host\d+)", text))
    (left,) = re.findall(r"and (\d+) more(?! cuts)", text)
    assert len(shown) + int(left) == 19
    assert "host0 800.0→ ←1,600.0 host1 silent 4 s" in text
    assert busy or shown == {"host1", "host2"}


def test_what_does_not_fit_is_counted_and_still_in_the_total() -> None:
    run = info(17)
    lines = drawn(run, (80, 24))
    assert len(lines) <= 24
    (more,) = (line for line in lines if "more cuts" in line)
    cuts = [line for line in lines if line.startswith("│ ") and line[2:4].strip().isdigit()]
    assert int(more.split()[2]) == 16 - len(cuts)
    total = sum(count.nbytes for count in record(run).wire if count.direction == "forward")
    assert format_bytes(total) in next(line for line in lines if line.startswith("│ all"))


def test_a_wide_terminal_shows_more_columns_and_a_narrow_one_fewer() -> None:
    def columns(width: int) -> str:
        (header,) = (line for line in drawn(info(2), (width, 30)) if "forward/step" in line)
        return " ".join(header.strip("│ ").split())

    rest = "vs bf16 {}error {}/step Mbit/s vs bf16 {}error"
    assert columns(120) == "cut forward/step Mbit/s " + rest.format(
        "vs fp32 ", "backward", "vs fp32 "
    )
    assert columns(80) == "cut forward/step Mbit/s " + rest.format("", "backward", "")
    assert columns(64) == "cut forward/step Mbit/s backward/step Mbit/s"
    assert columns(50) == "cut forward/step backward/step"


def test_before_the_first_step_there_is_a_bar() -> None:
    lines = drawn(info(8), (80, 24), steps=0)
    assert any("waiting for the first step" in line for line in lines)
    assert math.isclose(len(lines), 8, abs_tol=3)


def test_a_resumed_run_begins_where_it_was_saved() -> None:
    console = Console(width=100, height=40, force_terminal=True, color_system=None)
    panel = LivePanel(info(8), console, RunningValues(), done=250)
    with console.capture() as shown:
        console.print(panel.frame())
    assert "step 250/" in shown.get()
    assert " 0 %" not in shown.get()
    assert "resumed from step 250: waiting for the next step to finish" in shown.get()
