"""The Link contract: one direction between two ranks."""

from typing import Protocol

from torch import Tensor


class Link(Protocol):
    """One direction between two ranks; a process holds its sending or its receiving end.

    `slot` numbers the messages of a pass (the microbatch); a pass is one run of the schedule.
    `send` and `take` may be called from another thread than the rest, one at a time.
    """

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
