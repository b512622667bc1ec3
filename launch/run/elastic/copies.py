"""Copies of the stages' states in RAM, from which all go on if a machine is lost.

Every few steps each rank copies its state. A thread sends the copy to a rank of another machine,
behind all other traffic, and gets one from there or from a third. A copy counts once all ranks say
that they hold what they should; the one before it is kept until then.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import xxhash
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.checkpoint.contents import snapshot
from thinpipe.launch.checkpoint.state_file import pack_state
from thinpipe.launch.host.resources import free_memory
from thinpipe.launch.net.ranks.gloo_backend import Pair
from thinpipe.launch.run.elastic.messages import receive_header, receive_tensors, send_message
from thinpipe.launch.run.weights import as_bytes, describe

_log = logging.getLogger(__name__)
_REGROUP_S = 60.0
"""After that what broke a connection was no loss."""
_BEAT_S = 2.0
"""A message at least this often: the other end waits no longer than for a rank in training."""


class Packed(NamedTuple):
    """A state as it is sent."""

    tree: Any
    tensors: dict[str, Tensor]


def keepers(hosts: Sequence[str]) -> list[int]:
    """Which place keeps the copy of each: the next on another machine, or the next at all."""
    count = len(hosts)
    following = [[(place + n) % count for n in range(1, count)] for place in range(count)]
    return [
        next((other for other in others if hosts[other] != hosts[place]), others[0])
        for place, others in enumerate(following)
    ]


def newest_common(held: Mapping[int, Mapping[str, Any]], places: int) -> int | None:
    """The newest step of which all copies are left: of each place its own, or the kept one.

    `held` is what the places that are left have, as `RamCopies.held` says it.
    """
    kept = {(place, step) for has in held.values() for place, step in has["kept"]}
    missing = [place for place in range(places) if place not in held]
    common = set.intersection(*({*has["own"]} for has in held.values()))
    return max((s for s in common if all((place, s) in kept for place in missing)), default=None)


class RamCopies:
    """Those that one rank holds."""

    def __init__(
        self, store: Store, every: int, connect: Callable[[Store, int, int], Pair]
    ) -> None:
        """`connect(store, source, end)` connects a place with its keeper, the ends 0 and 1."""
        self._root, self._every, self._connect = store, every, connect
        self.own: dict[int, Any] = {}
        """Copies of this rank's state, by step."""
        self.kept: dict[tuple[int, int], Packed] = {}
        """Those that it keeps for others, by place and step."""
        self._changes = threading.Lock()
        self._latest: int | None = None
        self._next = self._change = 0
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._over = threading.Event()

    def close(self) -> None:
        """Nothing is copied any more."""
        self._over.set()
        self._queue.put(None)

    def regroup(self, change: int, place: int, hosts: Sequence[str], step: int) -> None:
        """Begin anew, at a `step`, among ranks on these `hosts`; copies of others are dropped."""
        self._queue.put(None)  # the end of the thread that is there
        self._store, self._ranks = PrefixStore(f"copies{change}", self._root), len(hosts)
        self._queue, self._latest, self._next = SimpleQueue(), None, step
        with self._changes:
            self._change = change
            self.own = {at: state for at, state in self.own.items() if at == step}
            self.kept = {at: packed for at, packed in self.kept.items() if at[1] == step}
        self._start(self._send, change, place, self._queue)
        for source, keeper in enumerate(keepers(hosts)):
            if keeper == place:
                self._start(self._receive, change, source)

    @property
    def held(self) -> dict[str, Any]:
        """The steps of its own copies, and places and steps of those that it keeps for others."""
        with self._changes:
            return {"own": [*self.own], "kept": [*self.kept]}

    def take(self, step: int, collect: Callable[[], Any]) -> str:
        """Copy the state before a step, if that is due; all ranks do, or none.

        Returns why it was due and not done, in words.
        """
        if step < self._next:
            return ""
        self._next = step + self._every
        whole = self._latest is None or self._has_come(self._latest)
        # the first one decides for all: they copy this step, or none does
        if self._store.compare_set(f"take/{step}", "", str(int(whole))) != b"1":
            return (
                f"step {self._latest} is still being copied to RAM, so step {step} is not: raise "
                "checkpoint.ram_every"
            )
        good, self._latest = (step if self._latest is None else self._latest), step
        with self._changes:
            over = [own for own in self.own if own not in (good, step)]
            into = self.own.pop(over[0]) if over else self.own.get(step)  # two in RAM, never three
        self.own[step] = snapshot(collect(), into)
        self._queue.put(step)
        return ""

    def _unneeded(self, source: int) -> dict[str, Tensor]:
        """What it kept for a place before the newest, which all have if another one is sent."""
        with self._changes:
            kept = sorted(at for at in self.kept if at[0] == source)
            return self.kept.pop(kept[0]).tensors if len(kept) > 1 else {}

    def _has_come(self, step: int) -> bool:
        """Whether every rank holds the copy that it keeps."""
        return self._store.add(f"has/{step}", 0) == self._ranks

    def _start(self, act: Callable[..., None], *args: Any) -> None:
        # a connection for each thread: a wait in one would hold up the others
        store = self._store.clone()  # type: ignore[attr-defined]  # not in its stubs
        threading.Thread(target=act, args=(store, *args), daemon=True).start()

    def _send(self, store: Store, change: int, place: int, queue: SimpleQueue[int | None]) -> None:
        with self._told(change):
            send, _ = self._connect(PrefixStore(str(place), store), place, 0)
            while (step := _next(queue)) is not None:
                if step < 0:
                    send_message(send, {})
                    continue
                # `take` writes over an older one only, which has been sent
                tree, tensors = pack_state(self.own[step])
                listed = [describe(name, tensor) for name, tensor in tensors.items()]
                header = {"step": step, "tree": tree, "digest": _digest(tensors)}
                send_message(send, {**header, "tensors": listed}, tensors.values())

    def _receive(self, store: Store, change: int, source: int) -> None:
        with self._told(change):
            _, receive = self._connect(PrefixStore(str(source), store), source, 1)
            while change == self._change:
                header = receive_header(receive, free_memory())
                if not header:
                    continue
                into = self._unneeded(source)
                tensors = receive_tensors(receive, header, free_memory(), into=into)
                if _digest(tensors) != header["digest"]:
                    raise ValueError(f"the copy of rank {source} came damaged")
                with self._changes:
                    if change != self._change:  # others may be at that step again, and differ
                        return
                    self.kept[source, header["step"]] = Packed(header["tree"], tensors)
                store.add(f"has/{header['step']}", 1)

    @contextmanager
    def _told(self, change: int) -> Iterator[None]:
        """What fails here ends the copies, never training."""
        try:
            yield
        except Exception as error:
            if self._over.wait(_REGROUP_S) or change != self._change:
                return  # a rank was lost, or the run has ended
            _log.warning(
                "note: states are not copied to RAM any more: %s: %s", type(error).__name__, error
            )


def _next(queue: SimpleQueue[int | None]) -> int | None:
    """The next step to send; -1 after a while without one."""
    try:
        return queue.get(timeout=_BEAT_S)
    except Empty:
        return -1


def _digest(tensors: Mapping[str, Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for tensor in tensors.values():
        hasher.update(as_bytes(tensor).numpy().data)
    return hasher.hexdigest()
