"""`thinpipe trace`: a measured step, for Perfetto or chrome://tracing.

Format: "Trace Event Format" of the Chromium project. Every rank is a process with a track for
compute, one for waits and as many for codecs as run at once.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from thinpipe.launch.config.cli_options import reject
from thinpipe.launch.host.words import format_duration
from thinpipe.launch.view.report.timeline import read_timeline
from thinpipe.pipeline.wire.told import ComputeEvent

_COMPUTE, _WAITING, _CODEC = range(3)  # tracks; more codecs follow
_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient", "wait": "wait for"}
_US = 1e6  # Perfetto's unit


def trace(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of a finished run.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output file; by default RUN_FOLDER/trace.json."),
    ] = None,
) -> None:
    """Write one step of a run as a Perfetto trace."""
    try:
        report = trace_run(folder, out or folder / "trace.json")
    except (ValueError, OSError) as error:
        reject(error)
    typer.echo(report)


def trace_run(folder: Path, out: Path) -> str:
    """Write a run's trace; return a summary of it.

    Raises:
        ValueError: the run has no timeline, or `out` cannot be written.
    """
    timeline = read_timeline(folder)
    title = f"step {timeline.step} of {folder}"
    events = processes(timeline.events)
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}
    try:
        out.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--out = {out}: cannot be written: {error.strerror}; name a file in an existing folder"
        ) from error
    step_s = max(event.end_s for event in timeline.events)
    return (
        f"{out}: step {timeline.step}, measured {format_duration(step_s)} on the links of the run\n"
        "open it in https://ui.perfetto.dev or chrome://tracing"
    )


def processes(events: Iterable[ComputeEvent]) -> list[dict[str, Any]]:
    """A process per rank, with its events on tracks."""
    by_rank: dict[int, list[ComputeEvent]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    drawn: list[dict[str, Any]] = []
    for rank, own in sorted(by_rank.items()):
        which = ", ".join(map(str, sorted({e.stage for e in own})))
        drawn.append(_meta("process_name", rank, 0, f"rank {rank} (stage {which})"))
        drawn.append(_meta("process_sort_index", rank, 0, rank))
        tracks = _tracks(own)
        names = {_COMPUTE: "compute", _WAITING: "waiting"}
        for track in sorted({track for track, _ in tracks}):
            drawn.append(_meta("thread_name", rank, track, names.get(track, "codec")))
        drawn += [_span(event, track) for track, event in tracks]
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


def _span(event: ComputeEvent, track: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{_NAMES.get(event.kind, event.kind)} {event.microbatch}",
        "cat": event.kind,
        "pid": event.rank,
        "tid": track,
        "ts": event.start_s * _US,
        "dur": (event.end_s - event.start_s) * _US,
        "args": {"stage": event.stage, "microbatch": event.microbatch},
    }
