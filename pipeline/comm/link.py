"""The Link contract: one direction between two ranks; and links within one process."""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from thinpipe.pipeline.comm.errors import TransportError


class Link(Protocol):
    """One direction between two ranks; a process holds its sending or its receiving end.

    `slot` numbers the messages of a pass (the microbatch); a pass is one run of the schedule.
    `send` and `take` may be called from another thread than the rest, one at a time.
    """

    @property
    def in_turns(self) -> bool:
        """Whether both ends take turns on one thread, so that `take` must not come early."""

    def begin_pass(self, number: int) -> None:
        """Wait for the sends of the pass before and start a new one; all ends count alike."""

    def expect(self, slot: int, nbytes: int) -> None:
        """Post the receive of a message of at most `nbytes`."""

    def take(self, slot: int) -> Tensor:
        """Wait for an expected message (uint8); a shorter one leaves the buffer's end undefined.

        Raises:
            TransportError: the peer is gone, or silent for longer than the group's timeout.
        """

    def send(self, slot: int, message: Tensor) -> None:
        """Send without waiting; the link keeps `message` alive, the caller must not change it."""


@dataclass
class LoopbackLink:
    """Both ends in one process: for simulations and tests, where stages take turns."""

    in_turns: ClassVar[bool] = True
    _messages: dict[int, Tensor] = field(default_factory=dict)
    _expected: dict[int, int] = field(default_factory=dict)

    def begin_pass(self, number: int) -> None:
        """Nothing is in flight between passes."""

    def expect(self, slot: int, nbytes: int) -> None:
        self._expected[slot] = nbytes

    def take(self, slot: int) -> Tensor:
        """Return the message, which must be there; a shorter one is zero-filled, as on gloo.

        Raises:
            TransportError: nothing was sent, or more than expected.
        """
        nbytes = self._expected.pop(slot)
        message = self._messages.pop(slot, None)
        if message is None or message.numel() > nbytes:
            found = "nothing" if message is None else f"{message.numel()} bytes"
            raise TransportError(
                f"loopback: expected up to {nbytes} bytes of microbatch {slot}, got {found}"
            )
        return torch.cat([message, message.new_zeros(nbytes - message.numel())])

    def send(self, slot: int, message: Tensor) -> None:
        self._messages[slot] = message.clone()
