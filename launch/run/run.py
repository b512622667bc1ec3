"""One rank's part of a run: epochs, batches, steps, evaluations."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from thinpipe.launch.build import ProgramParts
from thinpipe.launch.checkpoint.reshard import Layout
from thinpipe.launch.checkpoint.resume import Resume, common_resume
from thinpipe.launch.checkpoint.run_folder import RunFolder
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.corpus import check_batch_size, sized_for
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.launch.data.streams.stream import StreamSet
from thinpipe.launch.host.device import device_type
from thinpipe.launch.host.packages import check_writers
from thinpipe.launch.host.resources import rank_threads
from thinpipe.launch.host.terminal import outlive_terminal
from thinpipe.launch.memory.host import check_gpu, check_host
from thinpipe.launch.memory.model import ModelMemory, rank_memory
from thinpipe.launch.net.ranks.group import joins, tell_needs
from thinpipe.launch.net.ranks.handshake import HandshakeError, agree_now
from thinpipe.launch.net.ranks.network import ranks_here
from thinpipe.launch.net.ranks.restarts import STOPPED, reject_restarts
from thinpipe.launch.net.ranks.session import Session, StopFlag, TerminatedError, join
from thinpipe.launch.run.training import Training
from thinpipe.launch.run.weights import save_model
from thinpipe.launch.view.report.metrics import StepRecord
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.models.paths import user_path


class RankRun:
    """A run, as one of its ranks sees it; all ranks make the same calls in the same order.

        with RankRun(config, resume) as run:
            for epoch in run.epochs(3):
                for batch in run.batches_of(samples, size=32):
                    run.step(batch)
                run.evaluate_on(held_out)

    Epochs and batches that were done before a resume are left out; of a run that is done already
    the last epoch remains, with no batches.
    """

    def __init__(
        self,
        config: RunConfig,
        resume: Resume,
        *,
        show: int = 0,
        facts: Mapping[str, Any] | None = None,
        problem: str | None = None,
        given: ProgramParts | None = None,
    ) -> None:
        """The rank with local rank `show` shows progress on each host.

        `facts` must be equal on all ranks; `problem` is what keeps this rank from starting.
        """
        self.config, self._resume, self._show = config, resume, show
        self._facts, self._given = facts or {}, given or ProgramParts()
        self._problem = problem or _problem_if_writing(config)
        outlive_terminal()
        self._stack, self._joined, self._stop = ExitStack(), ExitStack(), StopFlag()
        self._session: Session | None = None
        self._training: Training | None = None
        self._folder: RunFolder | None = None
        self._samples: SampleSet | None = None
        self._epoch, self._done = -1, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        """Leave the other ranks and write the report; after an error, say what failed first."""
        if error is not None:
            last = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"
            rejected = self._training is None and isinstance(error, (ValueError, HandshakeError))
            if self._folder and rejected and last:
                self._folder.put_back()
            return self._stack.__exit__(kind, error, trace)
        with self._stack:
            self._end()
        return None

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left to train, counted from 0; `break` ends the run early, and saves.

        If none is left, the last one comes once more, without batches: what was trained can be
        evaluated and saved.

        Raises:
            ConfigError, HandshakeError, CheckpointError: the run cannot start.
            PeerError: a peer failed; start again with `resume`.
        """
        self.config = self.config.with_train(epochs=count)
        self._join()
        self._epoch = min(self._resume.epochs, count - 1)
        while self._epoch < count:
            yield self._epoch
            if self._training is not None:
                self._training.end_epoch(self._epoch, self._done)
                if self._training.ends_early:
                    break
            self._epoch += 1
        if self._training is not None:
            self._training.finish(self._done)

    def batches_of(self, samples: SampleSet, size: int) -> Iterator[Batch]:
        """This replica's batches of what is left of the epoch; each must be given to `step`.

        `samples` and `size`, the samples of a step over all replicas, stay the same for a run.

        Raises:
            ValueError: they changed, there is no epoch under way, or a batch was left out.
        """
        training = self._open(samples, size)
        while self._done in training.left_of(self._epoch):  # which grows if replicas are lost
            step = self._done
            self._stop.check()
            batch = training.batch(step)
            if batch is None:
                return
            yield batch
            if self._done != step + 1:
                raise ValueError(
                    f"step {step + 1}: its batch was not given to run.step; give it each"
                )
            if training.stopping:
                self._stop_here(training)
            if step != training.left_of(self._epoch).stop - 1:  # at its end, an evaluation first
                training.save_if_due(self._epoch, self._done)

    def step(self, batch: Batch) -> StepRecord:
        """Run one optimizer step; every rank gets the same record."""
        training = self._opened("run.step")
        record = training.step(batch, self._done)
        self._done += 1
        return record

    def evaluate_on(self, samples: SampleSet) -> dict[str, float]:
        """Metrics on held-out samples, by name; with cuts, those of compressed boundaries too."""
        return self._opened("run.evaluate").evaluate(samples, self._done - 1)

    def log(self, **metrics: float) -> None:
        self._opened("run.log").records.log(metrics)

    def save_model(self, path: str | Path) -> None:
        """Write the whole model's state dict as safetensors, on rank 0's machine.

        All ranks call it; rank 0 needs RAM for the whole model.

        Raises:
            OSError: the file cannot be written.
        """
        training, session = self._opened("run.save_model"), self._session
        if not self.config.model.is_own:
            raise ValueError(
                "run.save_model: writes models of one's own; take this one home with `thinpipe "
                f"export {self.config.run.path} FOLDER`, or thinpipe.load"
            )
        assert session is not None, "something was trained"
        training.together.meet("run.save_model", self._done)
        save_model(session, training.built, user_path(path).resolve())

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0; a replica that joins a run begins in a later one."""
        return self._epoch

    @property
    def done_before(self) -> bool:
        return self._opened("run.done_before").nothing_left

    def _stop_here(self, training: Training) -> NoReturn:
        training.save_now(training.done)
        reject_restarts(STOPPED)
        raise TerminatedError(self._stop.number)

    def _end(self) -> None:
        training, self._training = self._training, None
        if training is not None:
            training.finish(self._done)
            training.together.meet("the end of the program", self._done)
            self._joined.close()  # nobody waits for a rank that writes the report
            training.report()

    def _join(self) -> None:
        on_gpu = device_type(self.config.pipeline.device) == "cuda"
        torch.set_num_threads(1 if on_gpu else rank_threads(len(ranks_here())))
        self._stack.enter_context(self._joined)
        pipeline = self.config.pipeline
        rank = int(os.environ["RANK"])
        mesh = self.config.mesh(rank)
        if joins():  # alone at first
            takes_place = self.config.checkpoint.ram_every is not None
            ranks = int(os.environ["WORLD_SIZE"]) if takes_place else pipeline.pipeline_ranks
            mesh = Mesh(ranks, 1, rank)
        network, facts = self.config.network, {"config": self.config.shared(), **self._facts}
        wait_s, ended = pipeline.peer_timeout_s, self._stop.is_set
        joining = bool(self.config.goes_on_by)
        session = self._joined.enter_context(
            join(network, mesh, facts, self._problem, wait_s=wait_s, ended=ended, joining=joining)
        )
        layout = None if pipeline.auto_cuts else Layout.of(pipeline.model_dump(mode="json"))
        checkpoints = self.config.run.path / "checkpoints"
        self._resume = common_resume(session, checkpoints, self._resume, layout)
        folder = RunFolder(self.config.run.path)
        folder.acquire(session, resume=self._resume.wanted or joins())
        self._stack.callback(folder.release)
        self._folder = folder
        self._session = session
        if session.newcomer is not None:
            session.newcomer.check = self._stop.check

    def _open(self, samples: SampleSet, size: int) -> Training:
        if self._session is None:
            raise ValueError("run.batches: no epoch is under way; use it inside run.epochs")
        if self._training is None:
            self._training = self._start(self._session, samples, size)
        assert self._samples is not None, "set with it"
        same = samples is self._samples or samples.digest == self._samples.digest
        if not same or size != self.config.train.batch_size:
            raise ValueError(
                "run.batches: other samples or another size than before; cached "
                "activations belong to the samples of a run: make another run"
            )
        return self._training

    def _start(self, session: Session, samples: SampleSet, size: int) -> Training:
        config = self.config.with_train(batch_size=size)
        problem, notices = None, []
        try:
            check_batch_size(config, samples)
            check_stream(config, samples)
            config = sized_for(config, samples)
            notices = _check_room(config, len(samples), session)
        except ValueError as error:
            problem = str(error)
        digests = {"train": samples.digest, **self._facts.get("data", {})}
        agree_now(session.transport, {"config": config.shared(), "data": digests}, problem)
        shows = session.local_rank == self._show
        if config.pipeline.auto_cuts:
            from thinpipe.launch.cuts.auto_cuts import decide_cuts  # what measures blocks

            cuts = session.newcomer.began[0] if session.newcomer else self._resume.cuts
            config = decide_cuts(config, session, len(samples), saved=cuts, log=shows)
        config.check_model_cuts()
        training = _kind(config)(
            config, samples, session, digests, self._show, self._given, self._resume
        )
        training.stop_here = partial(self._stop_here, training)
        training.begin(self._stack)
        for notice in notices:
            training.display.note(notice)
        self._stop.begin_training(config.checkpoint.grace_s, training.stop)
        self.config, self._samples, self._done = config, samples, training.done
        if session.newcomer is not None:
            self._epoch = training.first_epoch
        return training

    def _opened(self, what: str) -> Training:
        if self._training is None:
            raise ValueError(f"{what}: nothing was trained yet; use it after run.batches")
        return self._training


def _check_room(config: RunConfig, sequences: int, session: Session) -> list[str]:
    """What to know of this host, or ValueError without room. Newcomers are told their memory."""
    if joins() and config.checkpoint.ram_every is not None:
        return []  # the launcher has checked: no place is free yet
    ranks, device = ranks_here(), device_type(config.pipeline.device)
    models: list[ModelMemory] | None = None
    if session.newcomer is not None:
        told = session.newcomer.needs(device)
        if told and len(told) == config.pipeline.pipeline_ranks:  # else other cuts, found later
            models = [ModelMemory(**needs) for needs in told]
        # numbered as those of replica 0 until it is let in, but they write nothing
        ranks = [rank + config.pipeline.pipeline_ranks for rank in ranks]
    check_gpu(config, sequences, ranks, models, local_rank=session.local_rank)
    if session.local_rank != 0:
        return []
    models = models or rank_memory(config)
    if config.goes_on_by and session.writes_run_folder:
        tell_needs(session.store, device, [asdict(needs) for needs in models])
    return check_host(config, sequences, ranks, models)  # for all ranks of it


def _kind(config: RunConfig) -> type[Training]:
    """How its ranks train; what goes on without lost ranks is imported only then."""
    if config.checkpoint.ram_every is not None:
        from thinpipe.launch.run.elastic.redoing import RedoingTraining

        return RedoingTraining
    if config.goes_on_by:
        from thinpipe.launch.run.elastic.training import ElasticTraining

        return ElasticTraining
    return Training


def _problem_if_writing(config: RunConfig) -> str | None:
    """A package that is missing on rank 0, which writes; other machines need none."""
    if os.environ.get("RANK") == "0" and not joins():
        try:
            check_writers(config.report.writers)
        except ValueError as error:
            return str(error)
    return None


def check_stream(config: RunConfig, samples: object) -> None:
    """Check that nothing is cached of samples that come once.

    Raises:
        ConfigError: a boundary does, or there are several epochs.
    """
    if not isinstance(samples, StreamSet):
        return
    for (cut, direction), spec in config.specs.items():
        if spec.remembers:
            raise ConfigError(
                f'boundary.{direction}.kind = "{spec.kind}" (cut {cut}): caches what it was sent '
                'of a sample, and a stream has each sample once; use kind = "stateless" '
                "(tp.Stateless) or a dataset with indices"
            )
    if config.train.epochs > 1:
        raise ConfigError(
            f"run.epochs({config.train.epochs}): a stream is read once; use run.epochs(1), with as "
            "many steps as you want"
        )
