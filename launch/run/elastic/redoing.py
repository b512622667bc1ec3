"""Training of a pipeline that goes on when a machine is lost: steps since a copy are redone."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, TypeVar, cast

from torch.distributed.distributed_c10d import Store

from thinpipe.launch.checkpoint.agreement import Ask
from thinpipe.launch.checkpoint.contents import collect, distribute, snapshot
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.group import Newcomer
from thinpipe.launch.net.ranks.session import Session
from thinpipe.launch.run.elastic.copies import RamCopies
from thinpipe.launch.run.elastic.places import Back, Places, WentBackError, answering, wait_for_call
from thinpipe.launch.run.elastic.state import SENT, hand_over
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.launch.run.training import Training
from thinpipe.launch.view.report.metrics import StepRecord
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.step_stats import StepTotals

_T = TypeVar("_T")


class RedoingTraining(ElasticTraining):
    """`Training` with checkpoint.ram_every.

    Who calls its methods need not know that all went back: they redo what was done before.
    """

    _elastic: Places  # type: ignore[assignment]  # its other kind

    def __init__(self, config: RunConfig, samples: Any, session: Session, *rest: Any) -> None:
        """As of `Training`; a newcomer waits until a place is free."""
        self._call, newcomer = None, session.newcomer
        self._had = 0  # steps that were done before all went back
        self._in_step = False
        if newcomer is not None:
            self._call = wait_for_call(newcomer, session.mesh, config.network.own_name())
            with answering(newcomer, self._call):
                transport = cast(GlooTransport, session.transport)
                transport.stand_in(config.pipeline.pipeline_ranks, self._call.place)
                super().__init__(config, samples, session, *rest)
        else:
            super().__init__(config, samples, session, *rest)

    def begin(self, stack: ExitStack) -> None:
        if self._call is None:
            super().begin(stack)
            self._had = self.done
            self._begin_copies(0, self.done)
        else:
            assert self._session.newcomer is not None, "it was called"
            with answering(self._session.newcomer, self._call):
                super().begin(stack)
            self._redone(self._had, lambda: None)

    def finish(self, done: int) -> None:
        super().finish(done)
        self._copies.close()

    @property
    def nothing_left(self) -> bool:
        return self._call is None and super().nothing_left

    @property
    def point(self) -> tuple[int, int] | None:
        """How many steps are done or were, and the epoch; None if the run is about to end."""
        over = self.stopping or self._finished
        return None if over else (max(self._had, self.done), self.first_epoch)

    @property
    def held(self) -> dict[str, Any]:
        return self._copies.held

    def ask_for_machine(self, lost: str, ranks: int) -> None:
        """Say that machines are missing, which had so many ranks."""
        wait_s = self._config.pipeline.peer_timeout_s
        several = f" --ranks {ranks}" if ranks > 1 else ""
        self.display.note(
            f"lost: {lost}; waiting for a machine in its place, at most {wait_s:.0f} s: "
            f"thinpipe train RUN.TOML --join HOST:PORT{several}"
        )

    def go_back(self, back: Back) -> None:
        """Have the state of an earlier step again; a collective.

        Raises:
            TransportError: a rank is lost meanwhile.
        """
        transport, mesh, step = self._session.transport, self._session.mesh, back.step
        own = [self._plan.state, self._checkpoints.number, self.built.best.state_dict()]
        plan, save, best = gather_json(transport, own)[0]
        for place, keeper in back.holders.items():
            kept = self._copies.kept[place, step] if mesh.rank == keeper else None
            state = hand_over(transport, keeper, place, kept)
            if mesh.rank == place:
                self._copies.own[step] = state
        state = self._copies.own[step]
        # an optimizer keeps the tensors that it is given
        distribute(self.built, snapshot(state["built"]), SENT)
        self._skips.state = state["skips"]
        self.built.best.load_state_dict(best)  # evaluations are not done again
        words, (serial, generation, _) = self._lost, self._checkpoints.number
        if not self._has_state:
            words, (serial, generation, _) = f"took the place of rank {mesh.rank}", save
            self._checkpoints.check_earlier(back.done, serial)
            self._plan.take(plan, mesh)
            self._had, self._epoch = back.done, back.epoch
        self._checkpoints.follow(serial, generation, None)  # a new disk has none of the last save
        self.done = self._agreed = step
        repaired = self.built.engine.begin(self._sampler.all_ids(), self._ids(step))
        self.records.go_back(step)
        self._checkpoints.connect()
        self._begin_copies(self._change, step)
        self._has_state = True
        self.display.note(f"{words}; all went back from step {back.done} to step {step}")
        if repaired:
            self.display.note_repaired(dict(repaired))
        if mesh.rank == 0:
            self.agreement.ask(Ask.SAVE)  # a disk is new, too

    def regrouped(
        self, change: int, before: tuple[int, int], passes: int, words: str, **_: Any
    ) -> None:
        self._change, self._lost = change, words
        self._regroup_parts(change, before)
        self.built.engine.regroup(self._sampler.all_ids(), passes)
        self.records.planned(self.steps, dict(enumerate(self._elastic.places)))
        self._agreed = self._elastic.goes_back_to
        self._agree_anew(change)

    def step(self, batch: Batch, step: int) -> StepRecord:
        self._epoch = self._sampler.epoch(step)
        return self._redone(step, lambda: self._once(batch, step))

    def evaluate(self, samples: Any, step: int) -> dict[str, float]:
        self._epoch = self._sampler.epoch(step)
        return super().evaluate(samples, step)

    def stop(self, whole: bool) -> Any:
        """Nobody leaves alone: another machine would be waited for."""
        return Training.stop(self, whole)

    def _join(self, store: Store, newcomer: Newcomer | None) -> None:
        self._elastic = self._met(Places, store, least=1, newcomer=newcomer, call=self._call)
        every = self._config.checkpoint.ram_every
        assert every is not None, "or this is another kind of training"
        self._copies = RamCopies(self._elastic.root, every, self._elastic.connect)

    def _come_in(self) -> None:
        self.start = self._elastic.take_place().step

    def _begin_weights(self) -> str | None:
        return super()._begin_weights() if self._call is None else None

    def _check_memories(self) -> None:
        if self._call is None:
            super()._check_memories()

    def _begin_copies(self, change: int, step: int) -> None:
        hosts = self._elastic.places
        self._copies.regroup(change, self._session.mesh.rank, hosts, step)

    def _collect(self) -> dict[str, Any]:
        return {"built": collect(self.built, memories=False), "skips": self._skips.state}

    def _train(self, batch: Batch, step: int) -> tuple[StepTotals, int, int]:
        def train() -> tuple[StepTotals, int, int]:
            if problem := self._copies.take(step, self._collect):
                self.display.note(problem)
            return Training._train(self, batch, step)

        return self._elastic.step(train, self._forget_step)

    def _once(self, batch: Batch, step: int) -> StepRecord:
        self._in_step = True
        try:
            return super().step(batch, step)
        finally:
            self._in_step = False

    def _all_do(self, do: Callable[[], _T]) -> _T:
        if self._in_step:  # which is done again as a whole
            return super()._all_do(do)
        had = max(self._had, self.done)
        return self._redone(had, lambda: super(RedoingTraining, self)._all_do(do))

    def _redone(self, had: int, do: Callable[[], _T]) -> _T:
        """The result of `do` after so many steps."""
        self._had = had
        while True:
            with suppress(WentBackError):
                self._redo(had)
                return do()

    def _redo(self, had: int) -> None:
        saves = False
        while self.done < had:
            batch = self.batch(self.done)
            assert batch is not None, "a stream is rejected"
            self._once(batch, self.done)
            saves |= self._save_again
            if self.stopping:
                self._had = self.done  # no more is done again
                self.stop_here()
        if saves:
            self.agreement.ask(Ask.SAVE)
