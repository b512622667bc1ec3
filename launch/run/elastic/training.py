"""Training that loses replicas, and is joined by others: what depends on who is in the run."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.gradcomp.base import GoesOn
from thinpipe.launch.checkpoint.agreement import Ask
from thinpipe.launch.config.caches import most_samples
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.terminal import end_now
from thinpipe.launch.net.ranks.fork_server import KERNELS, name_process
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.gloo_backend import Pair
from thinpipe.launch.net.ranks.group import Newcomer, tell_began
from thinpipe.launch.net.ranks.session import speaks, tell
from thinpipe.launch.run.elastic.ahead import Givers, Taker
from thinpipe.launch.run.elastic.messages import now_and_then
from thinpipe.launch.run.elastic.state import bring_up
from thinpipe.launch.run.elastic.visits import Elastic
from thinpipe.launch.run.training import Training
from thinpipe.launch.view.report.metrics import StepRecord
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.comm.transport import Scope
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.step_stats import StepTotals

_T = TypeVar("_T")
_SOONER_S = 0.5
"""Than a machine that is asked to stop would be ended."""


class _StoppedError(Exception):
    """The others stop after the last step, as this rank learns in what follows it."""


class ElasticTraining(Training):
    """`Training` with [elastic] min_replicas below the number of replicas."""

    _elastic: Elastic

    def begin(self, stack: ExitStack) -> None:
        """Losses count from the end of it on.

        Raises:
            ConfigError: the run is of a program, whose ranks may make unlike calls.
        """
        if self._is_program:
            raise ConfigError(
                f"{self.goes_on_by}: a program's ranks cannot go on without one yet; remove it, "
                "and use --max-restarts"
            )
        super().begin(stack)
        self._epoch = self._sampler.epoch(min(self.done, self.steps - 1))
        self._leaving, self._stops_here = threading.Event(), False
        self._timeline_step = -1  # its events are no numbers that all ranks agree on
        mesh, newcomer = self._session.mesh, self._session.newcomer
        self._givers = Givers(self.built, mesh.pipeline_ranks)
        if newcomer is None:
            self._givers.follow()
        self._changes: list[tuple[int, Mesh, str]] = []
        self._caches_agree, self._is_made = True, False
        self._taker: Taker | None = None
        store = newcomer.store if newcomer else self._session.store
        if self._session.writes_run_folder:
            tell_began(store, self._config.pipeline.cuts, self._plan.first_steps)
        self._join(store, newcomer)
        if newcomer is not None:  # it is no rank 0 any more
            name_process(f"thinpipe {self._elastic.number}")
        self._checkpoints.watch(lambda: self._elastic.trouble)
        self._has_state = newcomer is None
        if newcomer is None:
            self._checkpoints.locate(self._elastic.machines)
            self._checkpoints.connect()
        else:
            self._checkpoints.check_own()
            self._come_in()

    @property
    def first_epoch(self) -> int:
        """That which is under way, of which no steps may be left."""
        return self._epoch

    @property
    def goes_on_by(self) -> str:
        return self._config.goes_on_by

    def _join(self, store: Store, newcomer: Newcomer | None) -> None:
        """Meet the others in the store of the run."""
        least = self._config.elastic.min_replicas
        assert least is not None, "or this is a plain Training"
        self._elastic = self._met(Elastic, store, least=least, newcomer=newcomer)

    def _met(self, kind: Callable[..., _T], store: Store, **settings: Any) -> _T:
        """The `kind` of `Sections` that this rank does with the others."""
        return kind(
            store,
            cast(GlooTransport, self._session.transport),
            self,
            host=self._config.network.own_name(),
            wait_s=self._config.pipeline.peer_timeout_s,
            patience_s=self._config.network.patience_s,
            **settings,
        )

    def _come_in(self) -> None:
        wait_s = self._config.pipeline.peer_timeout_s
        limit = f"at most {wait_s:.0f} s (pipeline.peer_timeout_s)"
        self.display.note(f"waiting for the run to let this replica in once it lacks one, {limit}")
        # while it waits; the main thread runs none until it is let in
        kernels = threading.Thread(target=import_module, args=(KERNELS,), daemon=True)
        kernels.start()
        self._elastic.join()
        kernels.join()
        self._givers.follow()  # not before: what it took has made steps
        self._admits, self.start = False, self.done

    def finish(self, done: int) -> None:
        super().finish(done)
        self._elastic.close()

    def step(self, batch: Batch, step: int) -> StepRecord:
        record = super().step(batch, step)
        self._share_anew()
        return record

    def stop(self, whole: bool) -> threading.Event:
        """This machine leaves after the step under way, if the others can go on without it."""
        if whole or self._finished or not self._may_leave():
            return super().stop(whole)
        self._leaving.set()
        tell("asked to stop: this machine leaves after this step, and the others go on")
        late = threading.Timer(self._config.checkpoint.grace_s - _SOONER_S, self.leave_now)
        late.daemon = True
        late.start()
        return self._leaving

    def _may_leave(self) -> bool:
        with suppress(RuntimeError):  # the store is gone: so is the run
            if not (why := self._elastic.needed_for()):
                return True
            tell(f"the others cannot go on without this machine: {why}")
        return False

    def leave_now(self) -> None:
        """Tell the others, who go on, and end; at the end of a run nobody has to be told."""
        if self._finished:
            return
        who = f"rank {self._elastic.number} on {self._config.network.own_name()}"
        with suppress(RuntimeError):  # the store is gone: so is the run
            self._elastic.leave(f"{who}: asked to stop")
        left = f"left the run after step {self.done}; the others go on; --join brings it back"
        end_now(0, left if speaks() else "")

    @property
    def leaves(self) -> bool:
        """Whether this machine leaves after the step under way."""
        return self._leaving.is_set()

    @property
    def steps_are_joint(self) -> bool:
        """Whether all replicas make each step together: their ranks can take each other's place."""
        return self._sync.loss_scope == "global"

    @property
    def passes(self) -> int:
        """The number of the last pass through the pipeline."""
        return self.built.engine.passes

    def settle(self) -> None:
        """End what other threads do, and the pass under way: connections are broken."""
        self._sync.settle()
        self.built.engine.abandon_pass()

    def regrouped(
        self,
        change: int,
        before: tuple[int, int],
        passes: int,
        words: str,
        *,
        agreed: tuple[int, int] = (0, 0),
        at: int = 0,
        is_made: bool = False,
    ) -> None:
        """The mesh has changed, for the `change`-th time; this rank was `before` (replica, of).

        `passes` is the most that a rank has begun, `words` say who left or came, `agreed` is that
        of the rank that is furthest, and `at` is how many steps it has done: up to there all
        samples belong to whom they belonged to. `is_made`: this replica is of ranks of others,
        whose caches hold other samples.
        """
        mesh = self._session.mesh
        is_shared = before != (mesh.replica, mesh.replicas)
        self._regroup_parts(change, before)
        self._is_made |= is_made
        if is_shared:
            self._changes.append((at, mesh, words))
        self._share_anew()
        self._go_on(passes)
        behind = self._has_state and agreed[0] > self._agreed
        if agreed[0] == self.done and agreed != self.agreed:  # those lost did not say it here
            self._admits |= agreed[1] == Ask.ADMIT
            self._stops_here = agreed[1] == Ask.STOP and not behind
        stops = self.stopping or self._stops_here  # nobody has to be asked for it
        self._agree_anew(change, agreed if behind else (0, Ask.NOTHING), stops=stops)
        if self._has_state and not is_shared:
            self.display.note(words)

    def _share_anew(self) -> None:
        """What is left is shared by the replicas there are now, once this one has come so far."""
        while self._changes and self._changes[0][0] <= self.done:
            at, mesh, words = self._changes.pop(0)
            self._plan.share_anew(mesh, max(at, self.done))
            self._follow_plan()
            if self._has_state:
                self._say(words)

    def _regroup_parts(self, change: int, before: tuple[int, int]) -> None:
        self._sync.regroup(*before)
        self._checkpoints.regroup(change)
        self._checkpoints.locate(self._elastic.machines)
        self._checkpoints.watch(lambda: self._elastic.trouble)

    def _agree_anew(
        self, change: int, agreed: tuple[int, int] = (0, Ask.NOTHING), *, stops: bool = False
    ) -> None:
        """Agree with the new ranks, and ask them for what is not done, unless all stop."""
        before, store = self.agreement, PrefixStore(f"generation{change}", self._session.store)
        self.agreement = self._agreement(store, agreed)  # asked from here on, while `before` ends
        before.close(None if stops else self.agreement)
        if self._elastic.trouble:  # which `interrupt` may have told the one before
            self.agreement.release()

    def _go_on(self, passes: int) -> None:
        self._caches_agree = False
        self.built.engine.regroup(self._sampler.all_ids(), passes)
        self._follow_plan()

    def _follow_plan(self) -> None:
        self.built.engine.announce(self._sampler.all_ids())
        rates = self.built.lr_schedule
        rates.last_epoch = rates.last_epoch  # the setter computes rates, by the new plan
        self._checkpoints.facts = self._plan.facts(self._digests)
        if self._checkpoints.end is not None:
            self._checkpoints.end = self.steps
        self.records.planned(self.steps, self._elastic.hosts)

    def _say(self, words: str) -> None:
        if self._plan.changed_at == self.done < self.steps:
            words += f"; from step {self.done + 1} {self._plan.words()}"
        self.display.note(words)

    @property
    def agreed(self) -> tuple[int, int]:
        """What all ranks do after which step, as far as this one has come to it, or does it now."""
        if self.stopping or self._stops_here:
            return self.done, Ask.STOP
        return (self.done, Ask.ADMIT) if self._admits else self.agreement.last

    @property
    def at(self) -> tuple[int, int]:
        """The steps that are done, and the number of the last save, for newcomers to compare."""
        return self.done, self._checkpoints.number[0]

    def check_own(self, at: Sequence[int]) -> None:
        """Check that this newcomer has saved nothing later than a run that is `at` this point.

        Raises:
            CheckpointError: it has.
        """
        self._checkpoints.check_earlier(*at)

    def end_saves(self) -> None:
        """Wait for what other threads send; a collective."""
        self._checkpoints.wait()

    def give(self, send: Callable[[Tensor], None], close: Callable[[], None]) -> None:
        """Send this rank's state to a newcomer; called by another thread.

        Raises:
            TransportError: it is gone.
        """
        if self._config.pipeline.offload:  # its optimizer makes a step in parts
            return
        start_s, wait_s = time.perf_counter(), self._config.pipeline.peer_timeout_s
        tell = now_and_then(self.display.note, "a newcomer is sent its state, in training")
        if nbytes := self._givers.give(send, close, wait_s, tell):
            took_s = time.perf_counter() - start_s
            self.display.note(f"sent {nbytes / 1e6:.1f} MB of state in {took_s:.1f} s, in training")

    def take(self, connect: Callable[[], Pair]) -> None:
        """Take what `give` sends, in a thread."""
        tell = now_and_then(self.display.note, "the state is on its way")
        self._taker = Taker(self.built, lambda: connect()[1], tell)

    @property
    def came(self) -> int:
        """How much `take` has got."""
        return 0 if self._taker is None else self._taker.came

    def bring_up(self, places: Sequence[int]) -> None:
        """Members at these places of the mesh get the state of replica 0; a collective."""
        transport, start_s = self._session.transport, time.perf_counter()
        self._givers.end()
        if self._taker is not None:
            self._taker.finish(self._config.pipeline.peer_timeout_s)
        own = [self.done, self._plan.state, self._checkpoints.number, self._skips.state]
        own.append(self._epoch)
        done, plan, save, skips, epoch = gather_json(transport, own)[0]
        seed = self._config.run.seed + 1000 * self._elastic.number
        has = self._taker is not None and self._taker.has_state
        gives = transport.mesh.replica == 0
        with self._sync.parameters_to_give() if gives else nullcontext():
            nbytes = bring_up(self.built, transport, places, self._sync, seed=seed, has_some=has)
        if transport.mesh.rank in places:
            self._taker = None
            self.done, self._agreed, self._epoch = done, done, epoch
            self._plan.take(plan, transport.mesh)
            self._changes.clear()  # which the plan has
            self._checkpoints.follow(*save)
            self._skips.state = skips
            self._go_on(self.passes)
            self._has_state = True
            self._say("joined")
        elif nbytes:
            took_s = time.perf_counter() - start_s
            self.display.note(f"sent {nbytes / 1e6:.1f} MB of state in {took_s:.1f} s")

    def welcome(self) -> None:
        """Have all ranks let newcomers in, soon. Called by another thread."""
        if not self._admits:
            self.agreement.ask(Ask.ADMIT)

    def interrupt(self) -> None:
        """A rank was lost: end waits that are no messages. Called by another thread."""
        self.agreement.release()

    def prove_equal(self) -> None:
        """Compare the replicas' weights, and the ends of cuts; a collective.

        Raises:
            ConfigError: weights differ, or there is no room for other samples' activations.
        """
        self._agree_on_caches(self.done)  # first, as it drops samples only, not all that is held
        self._proof.compare(self.done)
        self._checkpoints.connect()

    def _agree_on_caches(self, step: int) -> None:
        """Before it, once after each change: the ends of this replica's cuts hold the same.

        All its ranks call it.
        """
        if self._caches_agree or self._finished:  # they are closed as training ends
            return
        if any(spec.remembers or spec.learns for spec in self._config.specs.values()):
            most = most_samples(self._config, len(self._samples))
            with self._room_for_caches():
                self.built.engine.go_on(self._ids(step), most, anew=self._is_made)
        self._caches_agree, self._is_made = True, False

    @property
    def _sync(self) -> GoesOn:
        return cast(GoesOn, self.built.sync)  # the config allows no other

    def _finish_sync(self) -> None:
        self._admits = False  # no step follows
        self._sync.finish_by(self._hold)

    def _hold(self, exchange: Callable[[], object]) -> None:
        """A meeting of the replicas: who has heard of all knows that all have what they need."""

        def meet() -> None:
            self._admit_if_due()
            exchange()
            self._session.transport.share(torch.zeros(0, dtype=torch.float64), "world")

        self._unless_stopped(meet, forget=self._sync.abandon)

    def _admit_if_due(self) -> None:
        """Let newcomers in; part of a section, as a loss meanwhile may say again that they come."""
        is_time = self._admits and self.done < self.steps and self._sync.lets_in(self.done)
        if is_time and self._has_samples_for_more():
            self._elastic.admit()
            self._admits = False
            self._elastic.prove()  # if this rank was behind in that

    def _has_samples_for_more(self) -> bool:
        """Whether one more replica would get some of this epoch's: else it comes in the next."""
        steps = range(self.done, self._sampler.steps_of(self._epoch).stop)
        # only models of one's own have no mask, with which a sample of before fills a place
        if not self._config.model.is_own or len(steps) > 1:  # each has one for each replica
            return True
        return sum(map(self._sampler.samples, steps)) > self._session.mesh.replicas

    def _train(self, batch: Batch, step: int) -> tuple[StepTotals, int, int]:
        self._epoch = self._sampler.epoch(step)
        engine, sampler, mesh = self.built.engine, self._sampler, self._session.mesh
        alone = not self._sync.due(step)
        has_met = self._sync.meet(step, self._hold)

        def train() -> StepTotals:
            nonlocal sampler, mesh
            self._admit_if_due()
            self._agree_on_caches(step)
            self._givers.goes_on(has_met=has_met)
            own = batch if sampler is self._sampler else self.batch(step)  # shared anew
            sampler, mesh = self._sampler, self._session.mesh
            assert own is not None, "a stream is rejected"
            return engine.train_step(own, step, self._ids(step + 1))

        scope: Scope = "replica" if alone else "world"

        def take(shared: list[list[float]]) -> StepTotals:
            self.done = step + 1
            return engine.finish_step(torch.tensor(shared, dtype=torch.float64), mesh, scope)

        totals = self._unless_stopped(
            train,
            forget=self._forget_step,
            pack=lambda _: engine.last_shared.tolist(),
            take=take,
            alone=alone,
        )
        if self._leaving.is_set():
            self.done = step + 1
            self.leave_now()
        return totals, sampler.epoch(step), sampler.samples(step)

    def _forget_step(self) -> None:
        self._sync.abandon()
        self.built.engine.abandon_step()

    def _all_do(self, do: Callable[[], _T]) -> _T:
        return self._unless_stopped(do, forget=self.built.engine.abandon_step)

    def _unless_stopped(self, do: Callable[[], _T], **how: Any) -> _T:
        """A section; if the others stop before it, so does this rank."""

        def begin() -> _T:
            if self._stops_here:
                raise _StoppedError
            return do()

        try:
            result: _T = self._elastic.together(begin, **how)
        except _StoppedError:
            self.stopping, self._stops_here = True, False
            self.stop_here()
        return result
