"""The training loop of one rank: steps, evaluation, checkpoints, display, report."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from thinpipe.launch.build import build
from thinpipe.launch.checkpoint.run_folder import RunFolder, check_folder
from thinpipe.launch.checkpoint.state import Checkpoints, Resume, common_resume
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.corpus import Corpus, check_data
from thinpipe.launch.data.sampler import EpochSampler
from thinpipe.launch.distributed.elastic import rank_threads
from thinpipe.launch.distributed.gather import gather_json
from thinpipe.launch.distributed.handshake import versions
from thinpipe.launch.distributed.session import Session, StopFlag, join
from thinpipe.launch.host.packages import explain
from thinpipe.launch.overlay.ranks import carrier_status
from thinpipe.launch.plan.auto_cuts import decide_cuts
from thinpipe.launch.plan.memory_budget import (
    check_memory,
    memory_folder,
    memory_notices,
    plan_memory,
)
from thinpipe.launch.plan.message_cost import describe
from thinpipe.launch.report.console import Display
from thinpipe.launch.report.edge_trace import EdgeTrace
from thinpipe.launch.report.edges import edges_of, traces_of
from thinpipe.launch.report.metrics import (
    MetricsWriter,
    RunInfo,
    StepRecord,
    read_metrics,
)
from thinpipe.launch.report.summary import summarize
from thinpipe.launch.report.timeline import Timeline, gather_events
from thinpipe.pipeline.models.build import parameter_count, stage_counts
from thinpipe.pipeline.stage import ComputeEvent


def train_rank(config: RunConfig, resume: Resume, *, show: int) -> None:
    """Train as one rank of a run, under the environment that torchrun sets.

    The rank with local rank `show` shows progress on each host; all ranks have the same numbers.

    Raises:
        ConfigError, HandshakeError, CheckpointError: the run cannot start.
        PeerError: a peer failed; start again with `resume`.
    """
    torch.set_num_threads(rank_threads(len(_ranks_here())))
    corpus, problem = None, None
    try:
        check_folder(config.run.path)
        corpus = check_data(config)
        check_memory(config, len(corpus.train), _ranks_here())
    except (ValueError, OSError, ImportError) as error:
        problem = explain(error)
    facts = {"data": corpus.digests if corpus else None}
    stop = StopFlag()
    with join(config, facts, problem) as session:
        assert corpus is not None  # join raises on every rank if one has a problem
        resume = common_resume(session, config.run.path / "checkpoints", resume)
        folder = RunFolder(config.run.path)
        folder.acquire(session, resume=resume.wanted)
        shows = session.local_rank == show
        config = decide_cuts(config, session, resume=resume.wanted, log=shows)
        _Run(config, corpus, session, stop, show=show).train(resume)
        folder.release()


def _ranks_here() -> range:
    """The ranks on this host, which launchers number consecutively."""
    first = int(os.environ["RANK"]) - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class _Run:
    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        session: Session,
        stop: StopFlag,
        *,
        show: int,
    ) -> None:
        self._config, self._corpus, self._session, self._stop = config, corpus, session, stop
        self._shows = session.local_rank == show
        speaks = session.local_rank == max(0, show)
        self._carrier: Callable[[], dict[str, Any] | None] = (
            carrier_status if speaks else lambda: None
        )
        self._sampler = EpochSampler(
            len(corpus.train),
            batch_size=config.train.batch_size,
            replicas=config.pipeline.replicas,
            replica=session.mesh.replica,
            seed=config.run.seed,
        )
        self._steps = config.train.epochs * self._sampler.steps_per_epoch
        torch.manual_seed(config.run.seed + 1000 * session.mesh.rank)  # dropout
        self._built = build(
            config, session.transport, run_id=session.run_id, total_steps=self._steps
        )
        self._checkpoints = Checkpoints(
            config.run.path / "checkpoints",
            config.checkpoint.keep,
            self._built,
            session,
            {"config": config.shared(), "data": corpus.digests},
            config.data,
        )
        self._timeline: Timeline | None = None
        self._records: list[StepRecord] = []

    def train(self, resume: Resume) -> None:
        start = self._checkpoints.restore(resume.step) if resume.wanted else 0
        # after the first epoch, when AQ-SGD sends changes
        timeline_step = min(self._steps - 1, max(start, self._sampler.steps_per_epoch) + 2)
        with ExitStack() as stack:
            trace = stack.enter_context(EdgeTrace(self._carrier))
            display = self._open_display(stack, trace)
            if start >= self._steps:
                display.note(f"all {self._steps} steps are done already")
                return
            writer = self._open_metrics(stack, start, resume=resume.wanted)
            held = memory_notices(plan_memory(self._config, len(self._corpus.train)))
            if resume.wanted:
                display.note(f"resumed from step {start} of {self._config.run.path}")
            for notice in (*self._config.notices(), *self._corpus.notes, *held):
                display.note(notice)
            self._check_memories(start, display)
            for step in range(start, self._steps):
                self._stop.check()
                record = self._step(step, timeline=step == timeline_step)
                self._records.append(record)
                if writer is not None:
                    writer.write(record)
                display.step(record)
                for note in record.notes:
                    display.note(f"warning: {note}")
                self._maybe_save(step + 1)
            self._built.engine.close()
            self._finish(display, self._hosts(trace))

    def _step(self, step: int, *, timeline: bool) -> StepRecord:
        batch = self._corpus.train.batch(self._sampler.ids(step))
        lr = float(self._built.optimizer.param_groups[0]["lr"])
        start = time.perf_counter()
        totals = self._built.engine.train_step(batch, step, self._ids(step + 1))
        self._built.lr_schedule.step()
        if step + 1 == self._steps:
            self._built.sync.finish()
        elapsed = time.perf_counter() - start
        if timeline:
            events = gather_events(self._session.transport, self._built.engine.take_events(), start)
        record = StepRecord(
            step=step + 1,
            epoch=self._sampler.epoch(step) + 1,
            loss=totals.loss,
            tokens_per_s=totals.tokens / elapsed,
            step_s=elapsed,
            bubble=totals.bubble,
            wire=totals.wire,
            tokens=totals.tokens,
            grad_norm=totals.grad_norm,
            lr=lr,
            skipped=totals.skipped,
            sync_bytes=totals.sync_bytes,
            control_bytes=totals.control_bytes,
            eval=self._eval(step),
            repaired=dict(totals.repaired),
            notes=totals.notes,
        )
        if timeline:
            self._timeline = _timeline(self._config, record, events)
        return record

    def _check_memories(self, start: int, display: Display) -> None:
        try:
            repaired = self._built.engine.begin(self._sampler.all_ids(), self._ids(start))
        except OSError as error:
            raise ConfigError(
                f"memory.folder = {memory_folder(self._config)}: {error.strerror}; "
                "free disk space, name another folder, or lower memory.budget"
            ) from error
        if repaired:
            display.note_repaired(dict(repaired))

    def _ids(self, step: int) -> torch.Tensor:
        """This replica's samples of a step; none after the last."""
        return self._sampler.ids(step) if step < self._steps else torch.empty(0, dtype=torch.int64)

    def _eval(self, step: int) -> dict[str, float] | None:
        """Held-out metrics after an epoch, with boundaries uncompressed and compressed."""
        done, per_epoch = step + 1, self._sampler.steps_per_epoch
        due = done % (per_epoch * self._config.eval.every_epochs) == 0
        if not due and done != self._steps:
            return None
        metrics = self._evaluate(step, compressed=False)
        if self._config.pipeline.cuts:
            compressed = self._evaluate(step, compressed=True)
            metrics |= {f"{name}_compressed": value for name, value in compressed.items()}
        return metrics

    def _evaluate(self, step: int, *, compressed: bool) -> dict[str, float]:
        engine = self._built.engine
        tallies = [
            engine.eval_step(self._corpus.evaluation.batch(ids), step, compressed=compressed)
            for ids in self._eval_batches()
        ]
        return engine.objective.metrics([sum(column) for column in zip(*tallies, strict=True)])

    def _eval_batches(self) -> Iterator[torch.Tensor]:
        """This replica's share of the held-out sequences; all replicas get equally many batches."""
        mesh, size = self._session.mesh, self._config.train.batch_size
        for first in range(0, len(self._corpus.evaluation), size):
            ids = torch.arange(first, min(first + size, len(self._corpus.evaluation)))
            yield ids.tensor_split(mesh.replicas)[mesh.replica]

    def _maybe_save(self, done: int) -> None:
        options = self._config.checkpoint
        every = options.every_steps or options.every_epochs * self._sampler.steps_per_epoch
        if done == self._steps or done % every == 0:
            self._checkpoints.save(done)

    def _open_metrics(self, stack: ExitStack, start: int, *, resume: bool) -> MetricsWriter | None:
        if not self._session.writes_run_folder:
            return None
        folder = self._config.run.path
        write_config(self._config, folder / "config.toml")
        writer = MetricsWriter(folder / "metrics.jsonl", start if resume else None)
        self._records = read_metrics(folder / "metrics.jsonl")  # of the run that is resumed
        return stack.enter_context(writer)

    def _open_display(self, stack: ExitStack, trace: EdgeTrace) -> Display:
        info = _describe(self._config, self._steps) if self._shows else None
        return stack.enter_context(Display(info, trace, interactive=os.isatty(1)))

    def _hosts(self, trace: EdgeTrace) -> list[dict[str, Any] | None]:
        """What the carriers of all hosts know of their connections."""
        mine = self._carrier()
        if mine is not None:
            mine["trace"] = trace.samples
        return gather_json(self._session.transport, mine)

    def _finish(self, display: Display, hosts: Sequence[dict[str, Any] | None]) -> None:
        if not self._records:  # a finished run was resumed where its metrics are not
            return
        if not (self._session.writes_run_folder or self._shows):
            return
        info = _describe(self._config, self._steps)
        summary = summarize(info, self._records, edges_of(hosts))
        if self._session.writes_run_folder:
            from thinpipe.launch.report.html import (
                write_report,  # slow to import
            )

            events = self._timeline.events if self._timeline else ()
            write_report(
                info.folder,
                info,
                records=self._records,
                timeline=events,
                traces=traces_of(hosts),
                summary=summary,
            )
            if self._timeline is not None:
                self._timeline.write(info.folder)
        display.finish(summary)


def _timeline(config: RunConfig, record: StepRecord, events: Sequence[ComputeEvent]) -> Timeline:
    pipeline = config.pipeline
    return Timeline(
        step=record.step,
        schedule=pipeline.schedule,
        depth=pipeline.depth,
        microbatches=max((event.microbatch for event in events), default=0) + 1,
        accumulate=config.train.accumulate,
        pipeline_ranks=pipeline.pipeline_ranks,
        replicas=pipeline.replicas,
        cuts=pipeline.cuts,
        wire=record.wire,
        events=tuple(events),
    )


def _describe(config: RunConfig, steps: int) -> RunInfo:
    return RunInfo(
        name=config.run.name,
        folder=Path(config.run.path),
        stages=config.pipeline.stages,
        replicas=config.pipeline.replicas,
        schedule=config.pipeline.schedule,
        microbatches=config.pipeline.microbatches,
        cuts=config.pipeline.cuts,
        methods={key: describe(spec) for key, spec in config.specs.items()},
        total_steps=steps,
        parameters=parameter_count(config.model),
        exchanged=stage_counts(config.model, config.pipeline.cuts).trained,
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        versions=versions(),
        config_digest=config.digest(),
        unit="token" if config.model.task == "language" else "sample",
    )
