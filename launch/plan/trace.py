"""`thinpipe trace`: a measured step and its simulation, for Perfetto or chrome://tracing.

Format: "Trace Event Format" of the Chromium project. Every rank is a process with a track for
compute, one for waits and as many for codecs as run at once; a message is an async span from when
it was sent to when it was used.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from thinpipe.launch.config.cli_options import refuse
from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.host.links import format_rate, parse_rate, parse_time
from thinpipe.launch.host.network import Network
from thinpipe.launch.host.words import format_duration
from thinpipe.launch.plan.placement.events import SimulatedStep, TransferEvent, simulate
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.launch.view.report.timeline import Timeline, read_timeline
from thinpipe.pipeline.schedule import stage_to_rank
from thinpipe.pipeline.wire.told import DIRECTIONS, ComputeEvent, Direction

_COMPUTE, _WAITING, _CODEC = range(3)  # tracks; more codecs follow
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient", "wait": "wait for"}
_SIMULATED = 1000
_US = 1e6


def trace(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of a finished run.")],
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Link rate of the predicted step, as in 100mbit."),
    ] = None,
    delay: Annotated[
        str,
        typer.Option(metavar="TIME", help="One-way link delay of the predicted step, as in 20ms."),
    ] = "0ms",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output file; by default RUN_FOLDER/trace.json."),
    ] = None,
) -> None:
    """Write one step of a run as a Perfetto trace, with the predicted step for comparison."""
    try:
        rate_bps = parse_rate(rate, "--rate") if rate else None
        delay_s = parse_time(delay, "--delay")
        report = trace_run(folder, out or folder / "trace.json", rate_bps=rate_bps, delay_s=delay_s)
    except (ValueError, OSError) as error:
        refuse(error)
    typer.echo(report)


def trace_run(folder: Path, out: Path, *, rate_bps: float | None, delay_s: float) -> str:
    """Write a run's trace; return a summary of it.

    The simulated step has links of `rate_bps` (None: unlimited) and `delay_s` one way.

    Raises:
        ValueError: the run has no timeline, or `out` cannot be written.
    """
    timeline = read_timeline(folder)
    step_s = max(event.end_s for event in timeline.events)
    try:
        network = Network.uniform(timeline.pipeline_ranks, rate_bps, delay_s)
        simulated = predict_step(timeline, network)
        rate = "without a limit" if rate_bps is None else f"of {format_rate(rate_bps)}"
        delay = f" and {format_duration(delay_s)} one way" if delay_s else ""
        predicted = f"predicted {format_duration(simulated.step_s)} on links {rate}{delay}"
    except ValueError as error:
        simulated, predicted = None, f"not predicted: {error}"
    try:
        write_trace(out, timeline, simulated, title=f"step {timeline.step} of {folder}")
    except OSError as error:
        raise ValueError(
            f"--out = {out}: cannot be written: {error.strerror}; name a file in an existing folder"
        ) from error
    return (
        f"{out}: step {timeline.step}, measured {format_duration(step_s)} on the links of "
        f"the run, {predicted}\n"
        "open it in https://ui.perfetto.dev or chrome://tracing"
    )


def write_trace(
    path: Path, timeline: Timeline, simulated: SimulatedStep | None, *, title: str
) -> None:
    """Write the measured step and, as further processes, the simulated one."""
    events = _processes("", 0, timeline.events)
    ranks = _ranks(timeline)
    if timeline.accumulate == 1:
        events += _messages(transfers(timeline), ranks, 0)
    if simulated is not None:
        events += _processes("predicted: ", _SIMULATED, simulated.events)
        events += _messages(simulated.transfers, ranks, _SIMULATED)
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}
    path.write_text(json.dumps(trace), encoding="utf-8")


def predict_step(timeline: Timeline, network: Network) -> SimulatedStep:
    """The best step of the schedule with the compute, codecs and bytes of the measured one.

    Raises:
        ValueError: the step accumulates.
    """
    if timeline.accumulate > 1:
        raise ValueError(
            f"train.accumulate = {timeline.accumulate}: only steps that run the schedule once are "
            "simulated"
        )
    stages = range(len(timeline.cuts) + 1)
    seconds = _medians(timeline)
    work = Workload(
        replicas=1,
        schedule=timeline.schedule,
        microbatches=timeline.microbatches,
        forward_s=tuple(seconds["F", stage] for stage in stages),
        backward_s=tuple(seconds["B", stage] + seconds["W", stage] for stage in stages),
        activations=tuple(_message(timeline, seconds, cut, "forward") for cut in stages[:-1]),
        gradients=tuple(_message(timeline, seconds, cut, "backward") for cut in stages[:-1]),
        depth=timeline.depth,
        ranks_per_pipeline=timeline.pipeline_ranks,
    )
    return simulate(work, network)


def _ranks(timeline: Timeline) -> list[int]:
    stages = len(timeline.cuts) + 1
    found = stage_to_rank(timeline.schedule, stages=stages, ranks=timeline.pipeline_ranks)
    return [found[stage] for stage in range(stages)]


def transfers(timeline: Timeline) -> list[TransferEvent]:
    """Transfers of the first replica, from sent to used."""
    sent = {key: event.end_s for key, event in _codec_events(timeline, "encode").items()}
    used = {key: event.start_s for key, event in _codec_events(timeline, "decode").items()}
    return [
        TransferEvent(cut, direction, m, sent[cut, direction, m], used[cut, direction, m])
        for cut, direction, m in sorted(sent)
        if (cut, direction, m) in used
    ]


def _message(
    timeline: Timeline, seconds: dict[tuple[str, int], float], cut: int, direction: Direction
) -> Message:
    """Size and codec times of the messages over the cut after stage `cut`."""
    layer = timeline.cuts[cut]
    counts = [w for w in timeline.wire if (w.cut, w.direction) == (layer, direction)]
    return Message(  # none within a rank
        sum(w.nbytes for w in counts) // max(sum(w.messages for w in counts), 1),
        encode_s=seconds[f"encode {direction}", cut],
        decode_s=seconds[f"decode {direction}", cut],
    )


def _medians(timeline: Timeline) -> dict[tuple[str, int], float]:
    """Median seconds by kind and stage; of codecs by kind with direction, and cut."""
    spans: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.computes:
            spans[event.kind, event.stage].append(event.end_s - event.start_s)
    for kind in ("encode", "decode"):
        for (cut, direction, _), event in _codec_events(timeline, kind).items():
            spans[f"{kind} {direction}", cut].append(event.end_s - event.start_s)
    return defaultdict(float, {key: median(times_s) for key, times_s in spans.items()})


def _codec_events(timeline: Timeline, kind: str) -> dict[tuple[int, Direction, int], ComputeEvent]:
    """Events of the first replica by (cut after this stage, direction, microbatch).

    A stage between two other ranks has two events per microbatch: first of its activation, then
    its gradient.
    """
    found = dict[tuple[int, Direction, int], ComputeEvent]()
    ranks, seen = _ranks(timeline), set[tuple[int, int]]()
    own = (e for e in timeline.events if e.rank < timeline.pipeline_ranks and e.kind == kind)
    for event in sorted(own, key=lambda event: event.start_s):
        # where the activations of an encoding stage go, and those of a decoding one come from
        cut = event.stage if kind == "encode" else event.stage - 1
        local = not 0 <= cut < len(ranks) - 1 or ranks[cut] == ranks[cut + 1]
        again = (event.stage, event.microbatch) in seen
        seen.add((event.stage, event.microbatch))
        direction = DIRECTIONS[1] if local or again else DIRECTIONS[0]
        if direction == "backward":
            cut = event.stage - 1 if kind == "encode" else event.stage
        found[cut, direction, event.microbatch] = event
    return found


def _processes(prefix: str, first: int, events: Iterable[ComputeEvent]) -> list[dict[str, Any]]:
    by_rank: dict[int, list[ComputeEvent]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    drawn: list[dict[str, Any]] = []
    for rank, own in sorted(by_rank.items()):
        which, process = ", ".join(map(str, sorted({e.stage for e in own}))), first + rank
        drawn.append(_meta("process_name", process, 0, f"{prefix}rank {rank} (stage {which})"))
        drawn.append(_meta("process_sort_index", process, 0, process))
        tracks = _tracks(own)
        names = {_COMPUTE: "compute", _WAITING: "waiting"}
        for track in sorted({track for track, _ in tracks}):
            drawn.append(_meta("thread_name", process, track, names.get(track, "codec")))
        drawn += [_span(event, process, track) for track, event in tracks]
    return drawn


def _tracks(events: Sequence[ComputeEvent]) -> list[tuple[int, ComputeEvent]]:
    """Each event of a rank with its track; codec events that overlap are on different ones."""
    placed: list[tuple[int, ComputeEvent]] = []
    free_s: list[float] = []
    for event in sorted(events, key=lambda event: event.start_s):
        if event.kind not in ("encode", "decode"):
            placed.append((_WAITING if event.kind == "wait" else _COMPUTE, event))
            continue
        codec = next((i for i, end_s in enumerate(free_s) if end_s <= event.start_s), len(free_s))
        free_s[codec : codec + 1] = [event.end_s]
        placed.append((_CODEC + codec, event))
    return placed


def _meta(what: str, process: int, track: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if what.endswith("index") else "name"
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {key: value}}


def _span(event: ComputeEvent, process: int, track: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{_NAMES.get(event.kind, event.kind)} {event.microbatch}",
        "cat": event.kind,
        "pid": process,
        "tid": track,
        "ts": event.start_s * _US,
        "dur": (event.end_s - event.start_s) * _US,
        "args": {"stage": event.stage, "microbatch": event.microbatch},
    }


def _messages(
    sent: Sequence[TransferEvent], ranks: Sequence[int], first: int
) -> list[dict[str, Any]]:
    """An async span (two events) for each message, at its sender."""
    marks = []
    for number, event in enumerate(sent):
        what = "activation" if event.direction == "forward" else "gradient"
        sender = ranks[event.cut + (event.direction == "backward")]
        common = {
            "name": f"{what} {event.microbatch}",
            "cat": "message",
            "id": first + number,
            "pid": first + sender,
            "tid": 0,
        }
        marks.append({**common, "ph": "b", "ts": event.start_s * _US})
        marks.append({**common, "ph": "e", "ts": event.end_s * _US})
    return marks
