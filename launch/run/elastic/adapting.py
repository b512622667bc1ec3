"""The contract between who is in a run and what depends on that."""

from collections.abc import Sequence
from typing import Protocol


class Adapting(Protocol):
    """The parts of a run that depend on who is in it."""

    @property
    def passes(self) -> int:
        """The number of the last pass through the pipeline."""

    @property
    def agreed(self) -> tuple[int, int]:
        """What all ranks do after which step, as far as this one has come to it."""

    def settle(self) -> None:
        """End what other threads do, and the pass under way: connections are broken."""

    def regrouped(
        self,
        change: int,
        before: tuple[int, int],
        passes: int,
        words: str,
        *,
        agreed: tuple[int, int] = (0, 0),
    ) -> None:
        """The mesh has changed, the so-manieth time; this rank was one replica of so many.

        `passes` is the most that a rank has begun, `words` say who left or came, and `agreed` is
        that of the rank that is furthest.
        """

    def end_saves(self) -> None:
        """Wait for what other threads send; a collective."""

    def bring_up(self, places: Sequence[int]) -> None:
        """Members at these places of the mesh get the state of replica 0; a collective."""

    def welcome(self) -> None:
        """Have all ranks let newcomers in, soon. Called by another thread."""

    def interrupt(self) -> None:
        """A rank was lost: end waits that are no messages. Called by another thread."""

    def prove_equal(self) -> None:
        """Compare the replicas' weights; a collective.

        Raises:
            ConfigError: they differ.
        """
