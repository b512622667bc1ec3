"""Records of a run's steps: shown, written to its folder, and made into the report."""

import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.host import disk
from thinpipe.launch.host.packages import versions
from thinpipe.launch.host.resources import BackgroundLoad, usable_cores
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.view.report.edges import edges_of, traces_of
from thinpipe.launch.view.report.metric_table import scalars
from thinpipe.launch.view.report.metrics import MetricsWriter, RunInfo, StepRecord, read_metrics
from thinpipe.launch.view.report.summary import Summary, summarize
from thinpipe.launch.view.report.timeline import Timeline
from thinpipe.launch.view.terminal.display import Display
from thinpipe.launch.view.terminal.final import what_is_left
from thinpipe.pipeline.comm.transport import Transport
from thinpipe.pipeline.models.build import stage_counts
from thinpipe.pipeline.wire.told import ComputeEvent

if TYPE_CHECKING:
    from thinpipe.launch.view.report.journal import Journal, Place
    from thinpipe.launch.view.writers.writer import WriterThread

_LOAD_S = 20.0  # window over which the load of other processes is measured
_kept: list[subprocess.Popen[str]] = []
"""Servers whose input ends with this process; unless they are kept, Python ends it."""
_REPORT_SHARE = 0.01
"""Share of the time since the last report that the next may take: training waits for it."""


class Records:
    """The steps of a run so far; those from before a resume are read from its folder.

    A record is written when the next one comes, as an evaluation may still be added to it.
    """

    def __init__(
        self,
        config: RunConfig,
        info: RunInfo,
        display: Display,
        *,
        writes: bool,
        links: Callable[[], Sequence[dict[str, Any] | None]] = tuple,
        hosts: Sequence[str] = (),
    ) -> None:
        """Nothing is written unless this rank `writes` the run folder.

        `links` says what hosts' connections did so far, for what is seen before the end; `hosts`
        are the names of all ranks' machines.
        """
        self._links, self._places = links, places_of(config, dict(enumerate(hosts)))
        self._config, self._info, self._display, self._writes = config, info, display, writes
        self._records: list[StepRecord] = []
        self._writer: MetricsWriter | None = None
        self._trackers: list[WriterThread] = []
        self._pending: StepRecord | None = None
        self._told = 0  # the last step that trackers know of
        self._measured: dict[int, dict[str, Any]] = {}  # of steps that are to be done again
        self._journal: Journal | None = None
        self._reported = False
        self._load: BackgroundLoad | None = BackgroundLoad(family=True)
        self._report_took_s, self._report_at_s = 0.0, 0.0

    def open(self, stack: ExitStack, resume_step: int | None) -> None:
        """Begin the file, or go on with it after a step; the stack closes it."""
        if not self._writes:
            return
        path = self._info.folder / "metrics.jsonl"
        try:
            write_config(self._config, self._info.folder / "config.toml")
            self._writer = stack.enter_context(MetricsWriter(path, resume_step))
            self._records = read_metrics(path)  # of the run that is resumed
        except OSError as error:
            place = error.filename or path
            disk.warn_once("steps", f"steps are not recorded: {place}: {disk.why(error, path)}")
        if tools := self._config.report.writers:
            from thinpipe.launch.view.writers.writer import WriterThread, destination, open_writer

            run, project = self._config.run, self._config.report.project
            settings = self._config.model_dump(mode="json")
            place = destination(run.path, run.name, project, settings, resume_step)
            trackers = (WriterThread(tool, partial(open_writer, tool, place)) for tool in tools)
            self._trackers = [stack.enter_context(tracker) for tracker in trackers]
        self._open_journal(stack)
        stack.callback(self._report_so_far)  # at the end, on Ctrl-C, after a failure
        stack.callback(self.flush)

    def _open_journal(self, stack: ExitStack) -> None:
        from thinpipe.launch.view.report.journal import Journal

        self._journal = Journal(self._info, self._places, self._links)
        self._display.keep = self._noted
        if (port := self._config.watch.port) is not None:
            self._journal.write()  # which the page needs
            samples = self._config.eval.samples > 0
            page = served(self._info.folder, port, self._display.note, until_exit=samples)
            stack.enter_context(page)
        stack.enter_context(self._journal)  # left before the page, which shows how the run ended

    def _noted(self, text: str) -> None:
        from thinpipe.launch.view.report.journal import add_note

        last = self._pending or (self._records[-1] if self._records else None)
        add_note(self._info.folder, text, last.step if last else 0)

    def add(self, record: StepRecord) -> None:
        self.flush()
        record = replace(record, **self._measured.pop(record.step, {}))
        self._pending = record
        self._display.step(record)
        for note in record.notes:
            self._display.note(f"warning: {note}")
        if self._load is not None and self._load.age_s > _LOAD_S:
            if notice := self._load.notice():
                self._display.note(notice)
            self._load = None

    def planned(self, steps: int, hosts: Mapping[int, str]) -> None:
        self._info = replace(self._info, total_steps=steps)
        self._places = places_of(self._config, hosts)
        if self._journal is not None:
            self._journal.tell(self._info, self._places)
        self._display.planned(steps)

    def go_back(self, step: int) -> None:
        """Later steps are done again; what was measured after them stays."""
        self.flush()
        for record in self._records:
            if record.step > step and (record.eval or record.own):
                self._measured[record.step] = {"eval": record.eval, "own": record.own}
        self._records = [record for record in self._records if record.step <= step]
        if self._writer is not None:
            self._writer.rewrite(self._records)

    def ends_early(self, why: str) -> None:
        self._display.note(why)
        if self._journal is not None:
            self._journal.why = why

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        if self._pending is not None:
            self._pending = replace(self._pending, eval=dict(metrics))
            self._display.evaluated(self._pending)
            pause_s = time.monotonic() - self._report_at_s
            if self._report_took_s <= _REPORT_SHARE * pause_s:
                self._report_so_far()

    def log(self, metrics: Mapping[str, float]) -> None:
        if self._pending is not None:
            self._pending = replace(self._pending, own={**self._pending.own, **metrics})

    def flush(self) -> None:
        record, self._pending = self._pending, None
        if record is None:
            return
        self._records.append(record)
        if self._writer is not None:
            self._writer.write(record)
        for tracker in self._trackers if record.step > self._told else ():
            tracker.add(record.step, scalars(record))
        self._told = max(self._told, record.step)

    def _report_so_far(self) -> None:
        """Write the report of the steps so far; it is the last one if the run ends early."""
        records = [*self._records, *([self._pending] if self._pending else [])]
        if self._reported or not records or not self._writes:
            return
        began_s, hosts = time.monotonic(), self._links()
        self._write(records, hosts, summarize(self._info, records, edges_of(hosts)), None)
        self._report_at_s = time.monotonic()
        self._report_took_s = self._report_at_s - began_s

    def report(
        self, hosts: Sequence[dict[str, Any] | None], timeline: Timeline | None, *, shows: bool
    ) -> None:
        if not self._records or not (self._writes or shows):
            return
        summary = summarize(self._info, self._records, edges_of(hosts))
        if self._writes:
            self._reported = self._write(self._records, hosts, summary, timeline)
        self._display.finish(summary, what_is_left(self._info.folder) if self._reported else None)

    def _write(
        self,
        records: Sequence[StepRecord],
        hosts: Sequence[dict[str, Any] | None],
        summary: Summary,
        timeline: Timeline | None,
    ) -> bool:
        """A full disk is no reason to stop, or to hide why a run ended."""
        from thinpipe.launch.view.report.content import Story
        from thinpipe.launch.view.report.html import write_report  # rank 0's at an evaluation
        from thinpipe.launch.view.report.journal import read_notes

        folder = self._info.folder
        events = timeline.events if timeline else ()
        told = (self._places, read_notes(folder))
        try:
            write_report(Story(self._info, records, summary, events, traces_of(hosts), *told))
            if timeline is not None:
                timeline.write(folder)
        except OSError as error:
            disk.warn_once("report", f"{folder}/report.html: {disk.why(error, folder)}")
            return False
        return True


@contextmanager
def served(
    folder: Path, port: int, note: Callable[[str], None], *, until_exit: bool
) -> Iterator[None]:
    """Serve the page of a run from another process, as threads of this one would slow its steps.

    Where it is, is noted once it is there. When its standard input ends, also if this process is
    killed, it shows those who follow how the run ended, and ends itself: nobody waits for that.
    That is `until_exit` of this process, if its last act is to write samples. Ctrl-C is not for it.
    """
    words = ["watch", str(folder), "--listen", f"127.0.0.1:{port}", "--with-parent"]
    command = [sys.executable, "-P", "-m", "thinpipe.launch", *words]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    threading.Thread(target=_note_link, args=(server, note), daemon=True).start()
    try:
        yield
    finally:
        assert server.stdin is not None
        if until_exit:
            _kept.append(server)
        else:
            server.stdin.close()


def _note_link(server: subprocess.Popen[str], note: Callable[[str], None]) -> None:
    """Pass on where the page is; a server that cannot have its port says why itself."""
    assert server.stdin is not None
    assert server.stdout is not None
    with server.stdout:
        for line in server.stdout:
            if line.startswith("watch at ") and not server.stdin.closed:
                note(line.strip())
    server.wait()


def describe_run(config: RunConfig, steps: int) -> RunInfo:
    """A run's description for display and report."""
    return RunInfo(
        name=config.run.name,
        folder=Path(config.run.path),
        stages=config.pipeline.stages,
        replicas=config.pipeline.replicas,
        schedule=config.pipeline.schedule,
        microbatches=config.pipeline.microbatches,
        cuts=config.pipeline.cuts,
        methods={key: spec.words() for key, spec in config.specs.items()},
        total_steps=steps,
        parameters=stage_counts(config.model, ()).held,
        exchanged=stage_counts(config.model, config.pipeline.cuts).trained,
        machine=f"{platform.machine()}, {usable_cores()} cores",
        versions=versions(),
        config_digest=config.digest(),
        unit="token" if config.model.task == "language" else "sample",
        shards=config.pipeline.shards,
    )


def places_of(config: RunConfig, hosts: Mapping[int, str]) -> list["Place"]:
    """Where each rank runs, by the names of their machines; in the order of their places."""
    meshes = [config.mesh(place) for place in range(len(hosts))]
    stages = [
        [stage for stage, place in sorted(config.stage_ranks.items()) if place == mesh.position]
        for mesh in meshes
    ]
    return [
        {"rank": rank, "host": host, "stages": own, "replica": m.replica, "shard": m.shard}
        for m, (rank, host), own in zip(meshes, hosts.items(), stages, strict=True)
    ]


def timeline_of(config: RunConfig, record: StepRecord, events: Sequence[ComputeEvent]) -> Timeline:
    """The timeline of a step."""
    pipeline = config.pipeline
    return Timeline(
        step=record.step,
        schedule=pipeline.schedule,
        depth=pipeline.depth,
        microbatches=max((event.microbatch for event in events), default=0) + 1,
        accumulate=config.train.accumulate,
        pipeline_ranks=pipeline.pipeline_ranks,
        replicas=pipeline.dp_size,
        cuts=pipeline.cuts,
        wire=record.wire,
        events=tuple(events),
    )


def gather_events(
    transport: Transport, events: Sequence[ComputeEvent], start_s: float
) -> list[ComputeEvent]:
    """Events of all ranks in a step that this rank began at `start_s`; a collective call."""
    from thinpipe.launch.net.ranks.clock import seconds_ahead  # once in a run

    ahead_s = seconds_ahead(transport)
    own = [(e.stage, e.kind, e.microbatch, e.start_s - ahead_s, e.end_s - ahead_s) for e in events]
    everyone = gather_json(transport, {"start_s": start_s - ahead_s, "events": own})
    first_s = min(other["start_s"] for other in everyone)
    return [
        ComputeEvent(stage, kind, m, begin_s - first_s, end_s - first_s, place)
        for place, rank in enumerate(transport.mesh.world)
        for stage, kind, m, begin_s, end_s in everyone[rank]["events"]
    ]
