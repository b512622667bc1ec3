"""A replica's state goes to one that joins before that is let in, while training goes on.

Each rank of replica 0 copies its weights and optimizer in RAM. A thread sends the copy, behind all
other traffic, and then the gradients of every step since: sums over the replicas, the same on all,
without their zeros. With them the newcomer makes the same optimizer steps, and comes to what the
others hold. Nothing relies on that: once it is let in, digests say which tensors differ, and those
are sent while all wait (`state.py`). What fails here costs time.

Replicas that make local steps have each weights and moments of their own. A newcomer gets the
global model, and again after each exchange, and replica 0's moments. Those stay, though they are
older by as long as that took. Theirs is copied between two steps. That of equal replicas is copied
at once, since only the optimizer's step changes it, and that waits.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from thinpipe.gradcomp.base import GoesOn
from thinpipe.launch.checkpoint.base import base_of, saved_state
from thinpipe.launch.checkpoint.contents import snapshot
from thinpipe.launch.checkpoint.reshard import module_of
from thinpipe.launch.checkpoint.state_file import pack_state, unpack_state
from thinpipe.launch.components import Built
from thinpipe.launch.host.resources import free_memory
from thinpipe.launch.run.elastic.messages import (
    Tell,
    receive_header,
    receive_tensors,
    send_message,
    with_zeros,
    without_zeros,
)
from thinpipe.launch.run.elastic.state import digests
from thinpipe.launch.run.weights import describe
from thinpipe.pipeline.comm.errors import TransportError

_log = logging.getLogger(__name__)

_BEAT_S = 2.0
"""A message at least this often: the other end waits no longer than for a rank in training."""
_SPARE = 2.5
"""RAM that must be free, in sizes of the copy: it, and as much that may be queued, and a step."""
_MOST_AT_THE_END = 1 / 8
"""Of the state: steps that are still to be sent when the newcomer is let in, as all wait."""
_LITTLE_NBYTES = 4 << 20
"""So much may be queued, however small the state: at 100 Mbit/s a third of a second."""
_MOST_PER_VALUE, _MOST_BESIDES = 24, 1 << 20
"""Bytes of an optimizer per trained value, and of names: a newcomer makes room for no more."""


class Givers:
    """What a rank sends to newcomers; training calls `goes_on` and `end`, other threads `give`."""

    def __init__(self, built: Built, ranks: int = 1) -> None:
        """`ranks` is how many of this machine may do the same at once."""
        self._built, self._ranks = built, ranks
        self._still, self._depth = threading.RLock(), 0  # a class of optimizer may step in another
        self._all: list[Giver] = []

    def follow(self) -> None:
        """The optimizer's steps are those of training from here on."""
        self._built.optimizer.register_step_pre_hook(self._before_step)
        self._built.optimizer.register_step_post_hook(self._after_step)

    def give(
        self, send: Callable[[Tensor], None], close: Callable[[], None], wait_s: float, tell: Tell
    ) -> int:
        """As `Giver.give`, to one more; called by a thread."""
        giver = Giver(self._built, self._ranks)
        self._all.append(giver)
        try:
            if self._built.sync.replicas_equal:
                self._begin(giver, wait_s)
            return giver.give(send, close, wait_s, tell)
        finally:
            giver.close()

    def _begin(self, giver: "Giver", wait_s: float) -> None:
        if not self._still.acquire(timeout=wait_s):
            giver.end()
            return
        try:
            giver.begin()
        finally:
            self._still.release()

    def goes_on(self, *, has_met: bool) -> None:
        """Between two steps. `has_met`: replicas have exchanged something since the last call."""
        for giver in [*self._all]:  # another thread adds some
            if not giver.goes_on(has_met=has_met):
                self._all.remove(giver)

    def end(self) -> None:
        """All wait for what is queued."""
        for giver in [*self._all]:
            giver.end()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """It sees gradients as the optimizer does: summed over replicas, and clipped."""
        self._still.acquire()
        self._depth += 1
        if self._depth == 1 and self._built.sync.replicas_equal:
            for giver in [*self._all]:
                giver.keep(optimizer)

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1
        self._still.release()


class Giver:
    """One of `Givers`."""

    def __init__(self, built: Built, ranks: int = 1) -> None:
        self._built, self._ranks, self._changed = built, ranks, threading.Condition()
        self._state: Any = None
        self._messages: deque[tuple[dict[str, Any], dict[str, Tensor]]] = deque()
        self._nbytes = self._queued_nbytes = 0
        self._begun = self._ended = self._has_given_up = False

    @property
    def _sync(self) -> GoesOn:
        return cast(GoesOn, self._built.sync)

    def goes_on(self, *, has_met: bool) -> bool:
        """Whether it has something to do yet; see `Givers`."""
        if not self._ended and not self._built.sync.replicas_equal:
            if not self._begun:
                self.begin()
            elif has_met:
                with self._gives_up():
                    self._queue_weights()
        return not self._ended

    @contextmanager
    def _gives_up(self) -> Iterator[None]:
        """What fails ends the sending, never training: all wait for the state then."""
        try:
            yield
        except Exception as error:
            _log.warning("note: state is not sent ahead: %s: %s", type(error).__name__, error)
            self._give_up()

    def _give_up(self) -> None:
        with self._changed:
            self._messages.clear()
            self._has_given_up = self._ended = True
            self._changed.notify_all()

    def begin(self) -> None:
        """Copy the state, if there is room; nothing changes it meanwhile."""
        if self._ended:
            return
        with self._gives_up(), self._sync.parameters_to_give():
            state = _weights_of(self._built) | {"optimizer": self._built.optimizer.state_dict()}
            held = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
            self._nbytes = _nbytes_of(held)
            if free_memory() < _SPARE * self._nbytes * self._ranks:
                self.end()
                return
            self._state = snapshot(state)
            with self._changed:
                self._begun = not self._ended
                self._changed.notify_all()

    def _queue_weights(self) -> None:
        """In place of those that have not been sent yet, if any are queued."""
        with self._sync.parameters_to_give():
            tree, tensors = pack_state(snapshot(_weights_of(self._built)))
        with self._changed:
            self._messages.clear()
            self._queued_nbytes = 0
        self._queue({"tree": tree}, tensors)

    def end(self) -> None:
        """What is queued is the last, and nothing if it is much; called when all wait."""
        with self._changed:
            if self._queued_nbytes > max(_LITTLE_NBYTES, _MOST_AT_THE_END * self._nbytes):
                self._messages.clear()
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """The newcomer has all, or is gone."""
        with self._changed:
            self._messages.clear()
            self._state, self._ended = None, True

    def give(
        self,
        send: Callable[[Tensor], None],
        close: Callable[[], None],
        wait_s: float,
        tell: Tell = lambda _: None,
    ) -> int:
        """Send all, until `end`; `close` is called when nothing is queued. The bytes sent.

        `tell` is told how many bytes of the state are left.

        Raises:
            TransportError: the newcomer is gone, or this end has given up.
        """

        left = 0

        def go_on(tensor: Tensor) -> None:
            nonlocal left
            if self._has_given_up:  # what is left would be out of date
                raise TransportError("steps come faster than they are sent")
            send(tensor)
            left -= tensor.nbytes
            tell(left)

        with self._changed:
            if not self._changed.wait_for(lambda: self._begun or self._ended, wait_s):
                self._ended = True
            if not self._begun:
                return 0
        tree, tensors = pack_state(self._state)
        left = self._nbytes
        self._state = None  # so that tensors go as they are sent
        sent = send_message(go_on, *_message({"tree": tree}, tensors))
        follows = self._built.sync.replicas_equal
        while True:
            if not self._messages or not follows:  # the next exchange may come sooner than that
                close()
            if (message := self._next()) is None:
                break
            sent += send_message(go_on, *_message(*message))
        send_message(go_on, {"end": True})
        return sent

    def _next(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The next message, or a sign of life; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._ended, _BEAT_S)
            if self._messages:
                header, parts = self._messages.popleft()
                self._queued_nbytes -= _nbytes_of(parts.values())
                return header, parts
            return None if self._ended else ({"groups": []}, {})

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Queue the gradients of this step, but no more than a state has bytes: else give up."""
        if self._begun and not self._ended:
            with self._gives_up():
                settings, parts = list[Any](), list[Tensor]()
                for group in optimizer.param_groups:
                    thin = [without_zeros(parameter.grad) for parameter in group["params"]]
                    plain = {key: v for key, v in group.items() if type(v) in (bool, int, float)}
                    settings.append([plain, [len(some) for some in thin]])
                    parts += [part for some in thin for part in some]
                named = {str(number): part for number, part in enumerate(parts)}
                self._queue({"groups": settings}, named)

    def _queue(self, header: dict[str, Any], parts: dict[str, Tensor]) -> None:
        if self._queued_nbytes + _nbytes_of(parts.values()) > max(_LITTLE_NBYTES, self._nbytes):
            self._give_up()
            return
        with self._changed:
            self._messages.append((header, parts))
            self._queued_nbytes += _nbytes_of(parts.values())
            self._changed.notify_all()


class Taker:
    """The newcomer's end: a thread that takes a state, and makes steps."""

    def __init__(
        self,
        built: Built,
        connect: Callable[[], Callable[[Tensor], None]],
        tell: Tell = lambda _: None,
    ) -> None:
        """`connect` waits for the other end, and returns what fills a tensor with what comes.

        `tell` is told how many bytes of the state are left.
        """
        self._built, self._connect, self._tell = built, connect, tell
        values = sum(p.numel() for group in built.optimizer.param_groups for p in group["params"])
        held = sum(tensor.nbytes for tensor in pack_state(_weights_of(built))[1].values())
        self._most = _MOST_PER_VALUE * values + held + _MOST_BESIDES
        self.came = 0
        """Headers and pieces so far: who waits sees that it goes on."""
        self.steps = 0
        self.has_state = self._is_late = False
        self._changes = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, wait_s: float) -> None:
        """Wait for the last step; what has not begun to come counts no more.

        Raises:
            TransportError: it did not come in time.
        """
        with self._changes:
            self._is_late = self.came == 0
        if self._is_late:
            return
        self._thread.join(wait_s)
        if self._thread.is_alive():
            raise TransportError(
                f"the last steps from replica 0 did not come within {wait_s:.0f} s "
                "(pipeline.peer_timeout_s)"
            )

    def _run(self) -> None:
        try:
            receive = self._connect()
            while self._take(receive):
                pass
        except TransportError:  # what is missing is sent when all wait
            pass
        except Exception as error:
            _log.warning("note: a state was not taken ahead: %s: %s", type(error).__name__, error)

    def _take(self, receive: Callable[[Tensor], None]) -> bool:
        header = receive_header(receive, self._most)
        with self._changes:
            self.came += 1
            if "end" in header or self._is_late:
                return False
        tensors = receive_tensors(receive, header, self._most, self._has_come)
        if "tree" in header:
            if digests(tensors) != header["digests"]:
                raise ValueError("damaged on its way")
            _load(self._built, unpack_state(header["tree"], tensors.__getitem__))
            self.has_state = True
        elif header["groups"]:
            self._step(header["groups"], list(tensors.values()))
        return True

    def _has_come(self, left: int) -> None:
        self.came += 1
        self._tell(left)

    def _step(self, settings: Sequence[Any], parts: list[Tensor]) -> None:
        optimizer, left = self._built.optimizer, iter(parts)
        for group, (plain, counts) in zip(optimizer.param_groups, settings, strict=True):
            group.update(plain)
            for parameter, count in zip(group["params"], counts, strict=True):
                own = [next(left) for _ in range(count)]
                parameter.grad = with_zeros(own, parameter) if own else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.steps += 1


def _weights_of(built: Built) -> dict[str, Any]:
    """What replicas have in common, but for an optimizer's moments."""
    sync = cast(GoesOn, built.sync)
    if not sync.sends_ahead:
        return {}
    found = {str(stage.stage_index): saved_state(module_of(stage)) for stage in built.stages}
    return {"model": found} | ({} if sync.replicas_equal else {"sync": sync.shared_state()})


def _message(
    header: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], Iterator[Tensor]]:
    """For `send_message`; a tensor is let go once it is sent. States have digests."""
    names = [*tensors]
    header["tensors"] = [describe(name, tensor) for name, tensor in tensors.items()]
    if "tree" in header:
        header["digests"] = digests(tensors)
    return header, (tensors.pop(name) for name in names)


def _load(built: Built, state: Mapping[str, Any]) -> None:
    for stage in built.stages if "model" in state else ():
        module = module_of(stage)
        found = state["model"][str(stage.stage_index)]
        module.load_state_dict(found, strict=not base_of(module))
    if "sync" in state:
        built.sync.load_state_dict(state["sync"])
    if "optimizer" in state:
        built.optimizer.load_state_dict(state["optimizer"])


def _nbytes_of(parts: Iterable[Tensor]) -> int:
    return sum(part.nbytes for part in parts)
