"""A rank's training once its samples are known: steps, evaluations, checkpoints, records."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from thinpipe.launch.build import ProgramParts, build
from thinpipe.launch.checkpoint.agreement import Agreement, Ask
from thinpipe.launch.checkpoint.resume import Resume
from thinpipe.launch.checkpoint.state import Checkpoints
from thinpipe.launch.components import Built
from thinpipe.launch.config.caches import memory_folder, most_samples
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.launch.data.streams.stream import Sampler, StreamSampler, position
from thinpipe.launch.host import disk
from thinpipe.launch.host.resources import arithmetic
from thinpipe.launch.memory.rows import memory_notices, plan_memory
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.session import Session, tell_stop
from thinpipe.launch.run.connections import Connections
from thinpipe.launch.run.evaluation import Wanted, batches_of
from thinpipe.launch.run.proof import Proof
from thinpipe.launch.run.records import Records, describe_run, gather_events, timeline_of
from thinpipe.launch.run.sharing import Plan
from thinpipe.launch.run.skips import Skips
from thinpipe.launch.run.together import Together
from thinpipe.launch.view.report.metrics import StepRecord
from thinpipe.launch.view.report.timeline import Timeline
from thinpipe.launch.view.terminal.display import Display
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.step_stats import StepTotals

_T = TypeVar("_T")
_ENDED = "the run ends early, as evaluations are no better (eval.patience)"


class Training:
    """Steps of one rank; `epochs` long, in order from the one that a checkpoint left off at."""

    def __init__(
        self,
        config: RunConfig,
        samples: SampleSet,
        session: Session,
        digests: Mapping[str, str],
        show: int,
        given: ProgramParts,
        resume: Resume,
    ) -> None:
        """Build this rank's stages; `digests` are those of the samples, by set."""
        self._resume = resume
        self._config, self._samples, self._session = config, samples, session
        self.shows = session.local_rank == show
        speaks = session.local_rank == max(0, show)
        self._connections = Connections(session.mesh.rank, session.apart, speaks=speaks)
        resumed = resume.chosen.manifest if resume.chosen else None
        mesh = config.mesh(0) if session.newcomer else session.mesh  # its own is small yet
        self._plan = Plan(config, samples, mesh, resumed)
        self.built = replace(self._build(given), samples=position(samples))
        folder = config.run.path / "checkpoints"
        facts = self._plan.facts(digests)
        self._checkpoints = Checkpoints(folder, config, self.built, session, facts)
        if config.train.decay != "none":  # with it, a run may be made longer
            self._checkpoints.end = self.steps
        self._skips = Skips(config, speaks=session.writes_run_folder)
        objective, program = self.built.engine.objective, getattr(config.model, "program", ())
        self._wanted = Wanted(config.eval.metrics, objective, given.metrics, program)
        # ranks of a run file make the same calls, and need not ask each other
        rank, world = (mesh.rank, mesh.world_size) if given.is_program else (0, 1)
        wait_s = config.pipeline.peer_timeout_s
        self.together = Together(session.store, rank, world, wait_s=wait_s)
        self._proof = Proof(self.built, session.transport, config.train.verify_every)
        self._timeline: Timeline | None = None
        self._digests, self._is_program = digests, given.is_program
        self.done = self._agreed = 0  # steps that were done, and that all ranks agreed after
        self.start, self.stopping, self._finished = 0, False, False
        self._save_again = self._ended_before = self._admits = False
        self._best_is_due = -1
        self._hosts: list[dict[str, Any] | None] = []
        self.stop_here: Callable[[], NoReturn]

    def _build(self, given: ProgramParts) -> Built:
        session = self._session
        torch.manual_seed(self._config.run.seed + 1000 * session.mesh.rank)  # dropout
        return build(
            self._config,
            session.transport,
            run_id=session.run_id,
            total_steps=session.newcomer.began[1] if session.newcomer else self._plan.first_steps,
            pace=self._plan.pace,
            given=given,
        )

    @property
    def steps(self) -> int:
        return self._plan.steps

    @property
    def _sampler(self) -> Sampler:
        return self._plan.sampler

    @property
    def nothing_left(self) -> bool:
        """Whether the checkpoint was of a run that was at its end, or had ended early."""
        return self.start >= self.steps or self._ended_before

    @property
    def ends_early(self) -> bool:
        """Whether evaluations have not become better for as long as settings say."""
        return self.built.best.enough

    def begin(self, stack: ExitStack) -> None:
        """Restore what was saved, open display and metrics, and let both ends of cuts agree."""
        config, resume = self._config, self._resume
        self.start = self._checkpoints.resume(resume.chosen) if resume.chosen else 0
        self._ended_before = self.ends_early
        self.done = self._agreed = self.start
        self.agreement = self._agreement(self._session.store)
        started = None if resume.chosen else self._begin_weights()
        # after the first epoch, when AQ-SGD sends changes
        first = max(self.start, self._sampler.steps_per_epoch)
        step = min(self.steps - 1, first + 2)
        full = self._sampler.samples(step) >= config.train.batch_size  # as the last one may not be
        self._timeline_step = step if full or step == self.start else step - 1
        connections = stack.enter_context(self._connections)
        device = self.built.stages[0].device
        own = {"kind": arithmetic(device), "host": config.network.own_name()}
        ranks = gather_json(self._session.transport, {**own, "tells": connections.tells})
        connections.follow([number for number, rank in enumerate(ranks) if rank["tells"]])
        kinds = dict.fromkeys(rank["kind"] for rank in ranks)
        info = replace(describe_run(config, self.steps), machine="; ".join(kinds))
        self.display = Display(
            info if self.shows else None,
            connections.trace,
            interactive=os.isatty(1),
            done=self.start,
        )
        stack.enter_context(self.display)
        writes = self._session.writes_run_folder
        hosts = [rank["host"] for rank in ranks]
        self.records = Records(
            config, info, self.display, writes=writes, links=connections.all, hosts=hosts
        )
        if self.nothing_left:
            saved = f"the checkpoint is of step {self.start}"
            done = f"all {self.steps} steps are done" if self.start >= self.steps else _ENDED
            self.display.note(f"{done} already: {saved}")
            return
        self.records.open(stack, self.start if resume.wanted else None)
        if self._session.restart is not None:
            self.display.note(f"{self._session.restart}; from step {self.start}")
        if resume.wanted:
            self.display.note(f"resumed from step {self.start} of {config.run.path}")
        held = memory_notices(plan_memory(config, len(self._samples)))
        beginning = [started] if started else []
        if resume.chosen and self._plan.changed_at == self.start:
            beginning.append(self._plan.words())
        for notice in (*beginning, *config.notices(), *self._samples.notes, *held):
            self.display.note(notice)
        self._check_memories()

    def _begin_weights(self) -> str | None:
        """First weights, the same where they should be; what is to be said of them."""
        started = None
        if self._config.model.from_run:
            from thinpipe.launch.trained.model import start_from_run

            started = start_from_run(self.built, self._config)
        from thinpipe.launch.run.first_weights import begin_alike

        begin_alike(self.built, self._session.transport)
        return started

    @property
    def first_epoch(self) -> int:
        """That of the step which it begins with."""
        return self._sampler.epoch(min(self.start, self.steps - 1))

    def _agreement(self, store: Store, agreed: tuple[int, int] = (0, Ask.NOTHING)) -> Agreement:
        mesh = self._session.mesh
        return Agreement(
            store,
            mesh.rank,
            mesh.world_size,
            done=self._agreed,
            wait_s=self._config.pipeline.peer_timeout_s,
            on_stop=tell_stop,
            agreed=agreed,
        )

    def stop(self, whole: bool) -> threading.Event:
        """Have all ranks stop; the event is set once they know when."""
        return self.agreement.stop_all()

    def left_of(self, epoch: int) -> range:
        """The steps of an epoch that are still to be done."""
        steps = self._sampler.steps_of(epoch)
        stop = min(steps.stop, self.steps)
        return range(stop if self._ended_before else max(self.start, steps.start), stop)

    def batch(self, step: int) -> Batch | None:
        """This replica's samples of a step; None if a stream of them has ended before."""
        if not isinstance(self._sampler, StreamSampler):
            own = self._samples.batch(self._sampler.ids(step))
            return self._config.model.adapted(own).counting(self._sampler.counted(step))
        batch = self._sampler.batch(step)
        if batch is None:
            self._plan.steps = step
            self.built.sync.finish()
            self.records.ends_early(f"the stream of samples ended after {step} steps")
            return None
        return self._config.model.adapted(batch)

    def step(self, batch: Batch, step: int) -> StepRecord:
        """Run an optimizer step; ranks that wait for each other in it get the same numbers.

        `stopping` is set afterwards if all ranks stop here.
        """
        self.together.step(step)
        if self._checkpoints.retry_due():
            self.agreement.ask(Ask.SAVE)
        lr = next((float(g["lr"]) for g in self.built.optimizer.param_groups), 0.0)
        start = time.perf_counter()
        totals, epoch, samples = self._train(batch, step)
        self.done = step + 1
        asked = self.agreement.after(step + 1)
        self._agreed = step + 1
        self.stopping = asked == Ask.STOP
        self._save_again = asked == Ask.SAVE
        self._admits |= asked == Ask.ADMIT
        self.built.lr_schedule.step()
        if step + 1 == self.steps:
            self._finish_sync()
        elapsed = time.perf_counter() - start
        numbers = {name: value for name, value in vars(totals).items() if name != "seconds"}
        numbers["repaired"] = dict(totals.repaired)
        record = StepRecord(
            step=step + 1,
            epoch=epoch + 1,
            tokens_per_s=totals.tokens / elapsed,
            step_s=elapsed,
            lr=lr,
            samples=samples,
            eval=None,
            **numbers,
        )
        if step == self._timeline_step:
            events = self.built.engine.take_events()
            shared = gather_events(self._session.transport, events, start)
            self._timeline = timeline_of(self._config, record, shared)
        self.records.add(record)
        self._skips.count(record.step, skipped=record.skipped, empty=record.tokens == 0)
        if self._proof.is_due(record.step):
            self._all_do(lambda: self._proof.compare(record.step))
        return record

    def _train(self, batch: Batch, step: int) -> tuple[StepTotals, int, int]:
        """Numbers of the step, its epoch, and how many samples count in it."""
        totals = self.built.engine.train_step(batch, step, self._ids(step + 1))
        return totals, self._sampler.epoch(step), self._sampler.samples(step)

    def _all_do(self, do: Callable[[], _T]) -> _T:
        return do()

    def _finish_sync(self) -> None:
        """Exchange what is left, after the last step."""
        self.built.sync.finish()

    def evaluate(self, samples: SampleSet, step: int) -> dict[str, float]:
        """Metrics with boundaries uncompressed and compressed, the same on all ranks."""
        self.together.meet("run.evaluate", step + 1)
        metrics = self._all_do(lambda: self._evaluate(samples, step))
        self.records.evaluated(metrics)
        if math.isnan(metrics["loss"]):
            self.display.note(
                f"warning: evaluation after step {step + 1}: none of its targets counts in the "
                "loss (all are masked), so it says nothing"
            )
        if not self._finished and self.built.best.judge(metrics, step + 1):
            self._best_is_due = step + 1
        if self.ends_early and not self.nothing_left:
            self.records.ends_early(f"{_ENDED}: {self.built.best.words()}")
        return metrics

    def _evaluate(self, samples: SampleSet, step: int) -> dict[str, float]:
        engine, evaluate = self.built.engine, self._wanted.evaluate
        held_out = partial(batches_of, samples, self._config, self._session.mesh)
        metrics = evaluate(engine, held_out(), step, compressed=False)
        if self._config.pipeline.cuts:
            compressed = evaluate(engine, held_out(), step, compressed=True)
            metrics |= {f"{name}_compressed": value for name, value in compressed.items()}
        return metrics

    def end_epoch(self, epoch: int, done: int) -> None:
        self.together.passes("the end of the epoch", done)
        self.save_if_due(epoch, done)

    def save_if_due(self, epoch: int, done: int) -> None:
        if done > self.start and self._save_due(epoch, done):
            self.together.passes("a checkpoint", done)
            self.records.flush()
            if done < self.steps:
                self._checkpoints.start(done)
            else:  # nothing trains meanwhile, so no copy is needed; `finish` tries again
                self._all_do(lambda: self._checkpoints.save(done, warns=False))

    def _save_due(self, epoch: int, done: int) -> bool:
        options = self._config.checkpoint
        due = done == self._sampler.steps_of(epoch).stop and (epoch + 1) % options.every_epochs == 0
        if options.every_steps:
            due = done % options.every_steps == 0
        return due or done in (self.steps, self._best_is_due) or self._save_again

    def save_now(self, done: int) -> None:
        self.records.flush()
        self._all_do(lambda: self._checkpoints.save(done))

    def finish(self, done: int) -> None:
        """Save the end, free the activation cache, and gather what the report needs.

        Calling it again does nothing.
        """
        if self._finished or done == self.start:
            return
        self._finished = True
        self.together.meet("the end of its epochs", done)
        self._skips.finish(done)
        self._all_do(lambda: self._checkpoints.save_last(done))
        if self.built.best.wanted:
            self.display.note(self.built.best.words())
        if done < self.steps:  # ended early, and saved as it was
            self._finish_sync()
        self.display.note(self._checkpoints.held_up())
        self.built.engine.close()
        hosts = self._connections.own()
        self._hosts = self._all_do(lambda: gather_json(self._session.transport, hosts))
        self.records.flush()

    def report(self) -> None:
        """Write the report; no other rank is needed any more."""
        if self._finished:
            self.records.report(self._hosts, self._timeline, shows=self.shows)

    def _check_memories(self) -> None:
        most = most_samples(self._config, len(self._samples))
        with self._room_for_caches():
            own, first = self._sampler.all_ids(), self._ids(self.start)
            repaired = self.built.engine.begin(own, first, most)
        if repaired:
            self.display.note_repaired(dict(repaired))

    @contextmanager
    def _room_for_caches(self) -> Iterator[None]:
        """Errors of activation caches say what to change."""
        try:
            yield
        except OSError as error:
            folder = memory_folder(self._config)
            raise ConfigError(
                f"memory.folder = {folder}: {disk.why(error, folder)}, or lower memory.budget"
            ) from error

    def _ids(self, step: int) -> torch.Tensor:
        over = step >= self.steps
        return torch.empty(0, dtype=torch.int64) if over else self._sampler.ids(step)
