"""Discrete-event simulation of one training step, from the schedule's order and a network.

It models the best that the schedule can do: a rank starts its next action as soon as the input has
arrived. Encoding and decoding overlap with that, on one thread for each direction of each cut, one
message after the other. A message is sent as soon as it is encoded. It passes its sender's uplink,
the link, and its receiver's downlink, each first in first out; a stage in the middle sends
activations and gradients through the same uplink.

So `step_s` is a lower bound to compare measured steps with: it contains pipeline bubbles, transfers
and codecs, but no copies, wake-ups, protocol headers or contention for cores, and decoding may run
ahead of the schedule without limit.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from thinpipe.launch.plan.network import Network
from thinpipe.pipeline.schedule import DEPTH, Action, ScheduleName, single_stage_order
from thinpipe.pipeline.stage import ComputeEvent
from thinpipe.pipeline.wire.header import Direction


@dataclass(frozen=True)
class Message:
    """A microbatch's message in one direction of a cut: its size, and the seconds of its codec."""

    nbytes: int
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class StepModel:
    """The parts of a step.

    `forward_s` and `backward_s` are seconds per microbatch, one for each stage; `activations` and
    `gradients` have one message for each cut. `network` connects the ranks, in bit/s of payload;
    None is unlimited. `ready_s` is when each stage may begin, if not at once. The schedule is one
    with a single stage per rank.

    Raises:
        ValueError: a sequence does not fit the number of stages.
    """

    schedule: ScheduleName
    microbatches: int
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    activations: Sequence[Message]
    gradients: Sequence[Message]
    network: Network | None = None
    depth: int = DEPTH
    ready_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        cuts = self.stages - 1
        expected = {"backward_s": self.stages, "activations": cuts, "gradients": cuts}
        for name, length in expected.items():
            found = len(getattr(self, name))
            if found != length:
                raise ValueError(
                    f"{name} has {found} entries, but forward_s has {self.stages} stages: "
                    f"pass {length}"
                )

    @property
    def stages(self) -> int:
        """Number of stages, each on a rank of its own."""
        return len(self.forward_s)


@dataclass(frozen=True)
class TransferEvent:
    """The transfer of a message, in seconds since the step began.

    `start_s` is when its first byte leaves, `end_s` when its last one arrives. `cut` is the stage
    before the cut.
    """

    cut: int
    direction: Direction
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step, with events of the same kinds as a measured one."""

    step_s: float
    events: tuple[ComputeEvent, ...]
    transfers: tuple[TransferEvent, ...]


def simulate(model: StepModel) -> SimulatedStep:
    """Simulate one step that begins with all ranks and links idle.

    Raises:
        ValueError: the schedule has several stages per rank, or the network has another
            number of hosts.
    """
    check_simulated(model.schedule)
    if model.network is not None and model.network.hosts != model.stages:
        raise ValueError(
            f"network has {model.network.hosts} hosts for {model.stages} stages: pass one for "
            "each (Network.for_ranks)"
        )
    simulation = _Simulation(model)
    simulation.run()
    events = sorted(simulation.events, key=lambda event: (event.rank, event.start_s))
    step_s = max(simulation.idle_since_s)
    return SimulatedStep(step_s, tuple(events), tuple(simulation.transfers))


def check_simulated(schedule: ScheduleName) -> None:
    """Check that a schedule can be simulated.

    Raises:
        ValueError: it has several stages per rank.
    """
    if schedule not in ("GPipe", "1F1B", "Deep1F1B"):
        raise ValueError(
            f'pipeline.schedule = "{schedule}": only schedules with one stage per rank are '
            "simulated; use GPipe, 1F1B or Deep1F1B"
        )


@dataclass(frozen=True)
class _Transfer:
    """A message between two ranks; `needed_by` is the action that waits for it."""

    source: int
    target: int
    message: Message
    needed_by: Action

    def event(self, start_s: float, end_s: float) -> TransferEvent:
        direction: Direction = "forward" if self.needed_by.kind == "F" else "backward"
        cut, m = min(self.source, self.target), self.needed_by.microbatch
        return TransferEvent(cut, direction, m, start_s, end_s)


class _Simulation:
    """A queue of events by time; handling one may add others."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._network = model.network or Network.uniform(model.stages)
        self._ready_s = model.ready_s or [0.0] * model.stages
        stages = range(model.stages)
        self._orders = [
            single_stage_order(
                model.schedule,
                stage,
                stages=model.stages,
                microbatches=model.microbatches,
                depth=model.depth,
            )[::-1]
            for stage in stages
        ]
        self.events: list[ComputeEvent] = []
        self.transfers: list[TransferEvent] = []
        self.idle_since_s = [0.0 for _ in stages]
        self._busy = [False for _ in stages]
        self._codec_free_s: dict[tuple[str, int, str], float] = {}
        self._up_free_s = [0.0 for _ in stages]
        self._down_free_s = [0.0 for _ in stages]
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._ready: set[Action] = set()
        self._queue: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    def run(self) -> None:
        """Handle events until the queue is empty."""
        for stage, ready_s in enumerate(self._ready_s):
            self._enqueue(ready_s, partial(self._start_next, stage))
        while self._queue:
            now_s, _, handle = heapq.heappop(self._queue)
            handle(now_s)
        assert not any(self._orders), "the schedule waits for messages that are never sent"

    def _enqueue(self, when_s: float, handle: Callable[[float], None]) -> None:
        self._count += 1  # equal times: first in, first out
        heapq.heappush(self._queue, (when_s, self._count, handle))

    def _start_next(self, stage: int, now_s: float) -> None:
        """Start the stage's next action, if it is idle and has the input."""
        if self._busy[stage] or not self._orders[stage] or now_s < self._ready_s[stage]:
            return
        action = self._orders[stage][-1]
        incoming, outgoing = self._incoming(action), self._outgoing(action)
        if incoming is not None and action not in self._ready:
            return
        self._orders[stage].pop()
        self._busy[stage] = True
        if incoming is not None:
            self._record(action, "wait", self.idle_since_s[stage], now_s)
        times_s = self._model.forward_s if action.kind == "F" else self._model.backward_s
        end_s = now_s + times_s[stage]
        self._record(action, action.kind, now_s, end_s)
        self._enqueue(end_s, lambda done_s: self._finish(action, outgoing, done_s))

    def _finish(self, action: Action, outgoing: _Transfer | None, now_s: float) -> None:
        self._busy[action.stage], self.idle_since_s[action.stage] = False, now_s
        if outgoing is not None:
            done_s = self._run_codec("encode", action, outgoing.message.encode_s, now_s)
            self._enqueue(done_s, lambda sent_s: self._send(outgoing, sent_s))
        self._start_next(action.stage, now_s)

    def _run_codec(
        self, kind: Literal["encode", "decode"], action: Action, seconds: float, now_s: float
    ) -> float:
        """When the codec thread of this direction has finished the message of `action`."""
        codec = (kind, action.stage, action.kind)
        start_s = max(now_s, self._codec_free_s.get(codec, 0.0))
        self._codec_free_s[codec] = start_s + seconds
        self._record(action, kind, start_s, start_s + seconds)
        return start_s + seconds

    def _send(self, transfer: _Transfer, now_s: float) -> None:
        source, target = link = transfer.source, transfer.target
        up_s = max(now_s, self._up_free_s[source])
        self._up_free_s[source] = up_s + self._network.uplink_s(source, transfer.message.nbytes)
        start_s = max(up_s, self._link_free_s.get(link, 0.0))
        self._link_free_s[link] = start_s + self._network.link_s(*link, transfer.message.nbytes)
        self._enqueue(
            start_s + self._network.latency_s[source][target],
            lambda first_s: self._deliver(transfer, start_s, first_s),
        )

    def _deliver(self, transfer: _Transfer, start_s: float, first_s: float) -> None:
        """The first byte reaches the downlink of the target."""
        nbytes, target = transfer.message.nbytes, transfer.target
        free_s = max(first_s, self._down_free_s[target]) + self._network.downlink_s(target, nbytes)
        self._down_free_s[target] = free_s
        end_s = max(free_s, first_s + self._network.link_s(transfer.source, target, nbytes))
        self.transfers.append(transfer.event(start_s, end_s))
        self._enqueue(end_s, lambda now_s: self._arrive(transfer, now_s))

    def _arrive(self, transfer: _Transfer, now_s: float) -> None:
        done_s = self._run_codec("decode", transfer.needed_by, transfer.message.decode_s, now_s)
        self._enqueue(done_s, lambda ready_s: self._input_ready(transfer.needed_by, ready_s))

    def _input_ready(self, action: Action, now_s: float) -> None:
        """The input of `action` is decoded."""
        self._ready.add(action)
        self._start_next(action.stage, now_s)

    def _incoming(self, action: Action) -> Message | None:
        if action.kind == "F":
            return self._model.activations[action.stage - 1] if action.stage > 0 else None
        last = action.stage == self._model.stages - 1
        return None if last else self._model.gradients[action.stage]

    def _outgoing(self, action: Action) -> _Transfer | None:
        target = action.stage + (1 if action.kind == "F" else -1)
        if not 0 <= target < self._model.stages:
            return None
        needed_by = Action(action.kind, target, action.microbatch)
        message = self._incoming(needed_by)
        assert message is not None
        return _Transfer(action.stage, target, message, needed_by)

    def _record(
        self,
        action: Action,
        kind: Literal["F", "B", "encode", "decode", "wait"],
        start_s: float,
        end_s: float,
    ) -> None:
        if end_s > start_s:
            self.events.append(
                ComputeEvent(action.stage, kind, action.microbatch, start_s, end_s, action.stage)
            )
