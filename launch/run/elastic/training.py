"""Training that goes on without replicas it loses: what depends on who is in the run."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TypeVar, cast

import torch
from torch.distributed.distributed_c10d import PrefixStore

from thinpipe.gradcomp.gradient_sync import GradientSync
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.terminal import end_now
from thinpipe.launch.net.ranks.session import speaks, tell
from thinpipe.launch.run.elastic.generations import Elastic
from thinpipe.launch.run.training import Training
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.step_stats import StepTotals

_T = TypeVar("_T")
_SOONER_S = 0.5
"""Than a machine that is asked to stop would be ended."""


class ElasticTraining(Training):
    """`Training` with [elastic] min_replicas below the number of replicas."""

    _elastic: Elastic

    def begin(self, stack: ExitStack) -> None:
        """Losses count from the end of it on.

        Raises:
            ConfigError: the run is of a program, whose ranks may make unlike calls.
        """
        least, wait_s = self._config.elastic.min_replicas, self._config.pipeline.peer_timeout_s
        assert least is not None, "or this is a plain Training"
        if self._is_program:
            raise ConfigError(
                f"elastic.min_replicas = {least}: a program's replicas cannot go on without one "
                "yet; remove it, and use --max-restarts"
            )
        super().begin(stack)
        self._leaving = threading.Event()
        self._timeline_step = -1  # its events are no numbers that all ranks agree on
        transport = cast(GlooTransport, self._session.transport)
        host = self._config.network.own_name()
        self._elastic = Elastic(
            self._session.store, transport, self, host=host, least=least, wait_s=wait_s
        )
        self._checkpoints.watch(lambda: self._elastic.loss)
        self._checkpoints.locate()

    def finish(self, done: int) -> None:
        """As before; losses count no longer."""
        super().finish(done)
        self._elastic.close()

    def stop(self, whole: bool) -> threading.Event:
        """This machine leaves after the step under way, if the others can go on without it."""
        if whole or self._finished or not self._elastic.may_leave():
            return super().stop(whole)
        self._leaving.set()
        tell("asked to stop: this machine leaves after this step, and the others go on")
        late = threading.Timer(self._config.checkpoint.grace_s - _SOONER_S, self._leave)
        late.daemon = True
        late.start()
        return self._leaving

    def _leave(self) -> None:
        """Tell the others, who go on, and end; at the end of a run nobody has to be told."""
        if self._finished:
            return
        who = f"rank {self._session.mesh.rank} on {self._config.network.own_name()}"
        with suppress(RuntimeError):  # the store is gone: so is the run
            self._elastic.leave(f"{who}: asked to stop")
        left = f"left the run after step {self._done}; the others go on"
        end_now(0, left if speaks() else "")

    @property
    def passes(self) -> int:
        """The number of the last one (`Adapting`)."""
        return self.built.engine.passes

    def settle(self) -> None:
        """End what was under way (`Adapting`)."""
        self._sync.settle()
        self.built.engine.abandon_pass()

    def replicas_left(
        self, generation: int, before: tuple[int, int], passes: int, lost: str
    ) -> None:
        """Go on in a new mesh (`Adapting`)."""
        self._sync.regroup(*before)
        self._plan.share_anew(self._session.mesh, self._done)
        self.built.engine.regroup(self._sampler.all_ids(), passes)
        rates = self.built.lr_schedule
        rates.last_epoch = rates.last_epoch  # by the new plan
        self._checkpoints.regroup(generation, self._plan.facts(self._digests))
        self._checkpoints.watch(lambda: self._elastic.loss)
        if self._checkpoints.end is not None:
            self._checkpoints.end = self.steps
        asked = self.agreement.pending
        store = PrefixStore(f"generation{generation}", self._session.store)
        self.agreement = self._agreement(store)
        if asked:
            self.agreement.ask(asked)
        self.records.planned(self.steps, self._elastic.members)
        self.display.note(f"lost: {lost}; from step {self._done + 1} {self._plan.words()}")

    def interrupt(self) -> None:
        """A rank was lost: it will not answer (`Adapting`)."""
        self.agreement.release()

    def prove_equal(self) -> None:
        """Compare the replicas that are left (`Adapting`)."""
        self._proof.compare(self._done)
        self._checkpoints.locate()

    @property
    def _sync(self) -> GradientSync:
        return cast(GradientSync, self.built.sync)  # the config allows no other

    def _train(self, batch: Batch, step: int) -> tuple[StepTotals, int, int]:
        engine, sampler = self.built.engine, self._sampler

        def train() -> StepTotals:
            nonlocal sampler
            own = batch if sampler is self._sampler else self.batch(step)  # shared anew
            sampler = self._sampler
            assert own is not None, "a stream is refused"
            return engine.train_step(own, step, self._ids(step + 1))

        def forget() -> None:
            self._sync.abandon()
            engine.abandon_step()

        def take(shared: list[list[float]]) -> StepTotals:
            self._done = step + 1
            return engine.finish_step(torch.tensor(shared, dtype=torch.float64))

        totals = self._elastic.together(
            train, forget=forget, pack=lambda _: engine.last_shared.tolist(), take=take
        )
        if self._leaving.is_set():
            self._done = step + 1
            self._leave()
        return totals, sampler.epoch(step), sampler.samples(step)

    def _all_do(self, do: Callable[[], _T]) -> _T:
        return self._elastic.together(do, forget=self.built.engine.abandon_step)
