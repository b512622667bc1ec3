"""What ranks do together counts for all of them or for none, also if one is lost meanwhile.

*Sections* are what all ranks do together: a step, an evaluation, a checkpoint. If a rank is lost,
the others abandon the section under way, form the next generation, and do that section again. No
rank can be more than one section ahead of another, as each needs messages of all. So who is behind
takes what those ahead have found in it. For a step that is the vector which all share before the
optimizer's step, as gradients were summed before.

Between two sections a replica may do steps *by itself*, as with local steps: they count for its own
ranks, in the same way. Replicas are at different steps then; a rank that is lost is noticed after
the step under way. A replica that is late for a section is waited for as long as for a peer, and
then left out.
"""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

from thinpipe.launch.run.elastic.generations import Generations
from thinpipe.pipeline.comm.errors import SilentError, TransportError
from thinpipe.pipeline.wire.header import DesyncError

_T = TypeVar("_T")
_WAITED = 0.9
"""Of the time that ranks wait for each other: after less, an error says nothing of who is late."""


class Sections(Generations):
    """`Generations` whose ranks do sections."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        mesh = self._transport.mesh
        self._known_as = mesh.replica, mesh.replicas  # to the run's parts
        self._done, self._packed = 0, None  # sections, and what the last one found
        self._alone, self._packed_alone = 0, None  # steps by itself since then
        self._trains_alone = False
        self._mended: list[int] = []  # where none was lost, after all
        self._proven = True

    def together(
        self,
        do: Callable[[], _T],
        *,
        forget: Callable[[], None] = lambda: None,
        pack: Callable[[_T], Any] = lambda result: result,
        take: Callable[[Any], _T] = lambda packed: packed,
        alone: bool = False,
    ) -> _T:
        """The result of a section, the same on all ranks that are left.

        `do` can be called again after `forget`, which undoes what it has begun. Its result becomes
        JSON by `pack`; a rank that is behind calls `take` with that of another. `alone`: it is a
        step of this replica by itself.

        Raises:
            TransportError: a peer is lost, and the run does not go on without it.
        """
        self._trains_alone |= alone
        while True:
            begun, began_s = False, time.monotonic()
            try:
                self._check()
                if not alone:
                    self.prove()
                begun = True
                result = do()
                packed = pack(result)
                break
            except TransportError as error:
                members = self._members
                waited = not alone and time.monotonic() - began_s > _WAITED * self._wait_s
                furthest = self._regrouped(error, waited=waited)
                behind = furthest["ahead"] > [self._done, self._alone]
                if behind:
                    packed = furthest["packed"]
                    result = take(packed)
                elif begun:
                    forget()
                self._tell(furthest, members)
                if behind:
                    break
        self._count(packed, alone=alone)
        return result

    def prove(self) -> None:
        """Compare the replicas, if they have changed since the last time.

        Raises:
            TransportError: a peer is lost.
        """
        if not self._proven and not self._cold:
            self._run.prove_equal()
            self._proven = True

    def _comes_in_s(self, is_silent: bool) -> float:
        """Longer if it may be in a step by itself, in which it hears nothing."""
        return self._wait_s if self._trains_alone else super()._comes_in_s(is_silent)

    def _check(self) -> None:
        """Raises TransportError: a rank was lost since the last section, or step."""
        if self._news.is_broken():
            raise TransportError(f"rank {self.number}: {self.trouble}")

    def _count(self, packed: Any, *, alone: bool) -> None:
        if alone:
            self._alone, self._packed_alone = self._alone + 1, packed
        else:
            self._done, self._packed, self._alone = self._done + 1, packed, 0

    def _regrouped(self, error: TransportError, *, waited: bool = False) -> Mapping[str, Any]:
        """Form the next generation; what its furthest rank has posted. `waited`: see `_WAITED`."""
        post = self._post() | {"waited": waited and isinstance(error, SilentError)}
        lost, posts = self._regroup(error, post)
        found = self._furthest(posts)
        if not lost:  # all see it alike
            if found["at"] == self._mended:  # connecting anew has not helped
                raise error
            self._mended = found["at"]
        self._tried = max(self._tried, found["tried"])
        self._news.tell()
        return found

    def _post(self) -> dict[str, Any]:
        """How far this rank is, for the others."""
        return {
            "done": self._done,
            "packed": self._packed,
            "alone": self._alone,
            "packed_alone": self._packed_alone,
            "steps": self._run.done,
            "passes": self._run.passes,
            "agreed": self._run.agreed,
            "tried": self._tried,
        }

    def _choose(self, silent: Set[int]) -> list[int]:
        """As of any; if one waited too long for others, those who are late for it are left out."""
        chosen = super()._choose(silent)
        if not chosen:
            return chosen
        posts = dict(zip(chosen, self._posts(chosen), strict=True))
        most = max(post["steps"] for post in posts.values())
        late = {member for member, post in posts.items() if post["steps"] < most - 1}
        if not any(post["waited"] for member, post in posts.items() if member not in late):
            return chosen
        others = super()._choose(silent | late)
        return others if self._are_enough(others) else chosen

    def _furthest(self, posts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """What the rank has posted that is furthest, as seen from here.

        `ahead` is how far it is: the sections that it has done, and its replica's steps since then.
        `at` is how far all are, the same on all ranks.
        """
        first = max(posts, key=lambda post: int(post["done"]))
        size = self._transport.mesh.pipeline_ranks
        place = self._members.index(self.number) // size * size
        own = max(posts[place : place + size], key=lambda post: (post["done"], post["alone"]))
        ahead, packed = [first["done"], 0], first["packed"]
        if first["done"] == self._done:
            ahead, packed = [self._done, own["alone"]], own["packed_alone"]
        if ahead > [self._done + 1, 0] or ahead[1] > self._alone + 1:
            raise DesyncError(
                f"rank {self.number} has done {self._done} of the steps, evaluations and saves "
                f"that another rank has done {ahead[0]} of; resume from a checkpoint (--resume)"
            )
        most = {name: max(post[name] for post in posts) for name in ("passes", "tried")}
        # others may still have before them what these have done
        most["agreed"] = max(p["agreed"] for p in posts if p["done"] == first["done"])
        steps = [post["steps"] for post in posts]
        found = {"ahead": ahead, "packed": packed, "steps": max(steps)}
        return {**most, **found, "done": first["done"], "at": [first["done"], sum(steps)]}

    def _tell(self, furthest: Mapping[str, Any], before: Sequence[int]) -> None:
        """Tell the run that its members are others than before, and what the furthest has done."""
        self._proven = False
        agreed = (int(furthest["agreed"][0]), int(furthest["agreed"][1]))
        gone = [member for member in before if member not in self._members]
        lost = self._news.lost_of(before)
        named = lost or f"ranks {gone}, which came too late"
        words = f"lost: {named}" if gone else "all are there: they have connected anew"
        made = [ranks for ranks in self._replicas if ranks not in self._as_replicas(before)]
        words += "".join(f"; ranks {str(ranks)[1:-1]} are a replica now" for ranks in made)
        over = [member for member in gone if lost and not self._news.lost_of([member])]
        words += f"; left over: {str(over)[1:-1]}" if over else ""
        is_made = any(self.number in ranks for ranks in made)
        more = {"agreed": agreed, "at": furthest["steps"], "is_made": is_made}
        self._adapt(int(furthest["passes"]), words, **more)

    def _adapt(self, passes: int, words: str, **more: Any) -> None:
        before, mesh = self._known_as, self._transport.mesh
        self._known_as = mesh.replica, mesh.replicas
        self._run.regrouped(self._generation + self._tried, before, passes, words, **more)
