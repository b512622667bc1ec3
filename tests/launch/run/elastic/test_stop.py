"""All ranks that are left stop after the same step, whatever they knew of it when one was lost."""

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore

from tests.launch.run.elastic.trained import leave, ranks_of, trains
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.agreement import Agreement, Ask
from thinpipe.launch.net.ranks.session import TerminatedError
from thinpipe.launch.run import training as plain
from thinpipe.launch.run.elastic.training import ElasticTraining as Elastic
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.step_stats import StepStats, StepTotals

EPOCH = 20


def heard_by_one(rank: int, port: int, folder: str, last: int) -> dict[str, Any]:
    """All are to stop after step `last`, which rank 0 knows, and rank 1 not before rank 2 is lost.

    Rank 0 asks in that step, which no rank can end without it.
    """
    store = TCPStore("127.0.0.1", port, is_master=False)
    save_now, train_step = Elastic.save_now, Elastic._train
    done = list[int]()

    def stop(training: Elastic, steps: int) -> None:
        if rank == 0:
            store.set("rank 0 stops", "")
        if rank == 2:
            store.wait(["rank 0 stops"], timedelta(seconds=PATIENCE_S))
            leave(training)
        save_now(training, steps)

    def ask(training: Elastic, batch: Batch, step: int) -> Any:
        if step == last - 1:
            store.set(f"{rank} is there", "")
            if rank == 0:
                store.wait(["1 is there", "2 is there"], timedelta(seconds=PATIENCE_S))
                assert training.stop(whole=True).wait(PATIENCE_S)
        return train_step(training, batch, step)

    Elastic.save_now, Elastic._train = stop, ask  # type: ignore[method-assign]
    told = heard_after_a_release() if rank == 1 else list[int]()
    try:
        trains(rank, port, folder, each=lambda _, step: done.append(step), ends=())
    except (TerminatedError, SystemExit) as error:
        return {"end": type(error), "done": done[-1], "told": told}
    return {"end": "trained to the end", "done": done[-1], "told": told}


def heard_after_a_release() -> list[int]:
    """This rank's agreements hear of a stop when they are released; after which steps."""
    released, told, release = threading.Event(), list[int](), Agreement.release

    def hear(step: int) -> None:
        told.append(step)
        assert released.wait(PATIENCE_S)

    def let_go(agreement: Agreement) -> None:
        release(agreement)
        released.set()

    plain.tell_stop = hear
    Agreement.release = let_go  # type: ignore[method-assign]
    return told


def lost_before_they_agree(rank: int, port: int, folder: str) -> int:
    """Rank 2 is lost after step 4, the end of which rank 0 misses, and takes from rank 1.

    Rank 1 is lost as it has new groups, but no new agreement. Rank 0 makes that when it knows, and
    asks all to save. Its last step.
    """
    done, made, told = list[int](), list[Agreement](), list[None]()
    agreement, interrupt, share = Elastic._agreement, Elastic.interrupt, StepStats.share

    def agree(training: Elastic, *rest: Any) -> Agreement:
        if len(made) == 1 and rank == 1:
            leave(training)
        if len(made) == 1:
            until(lambda: len(told) == 2)
            training.agreement.ask(Ask.SAVE)
        made.append(agreement(training, *rest))
        return made[-1]

    def tell(training: Elastic) -> None:
        interrupt(training)
        told.append(None)

    def miss(stats: StepStats, *rest: Any) -> StepTotals:
        totals = share(stats, *rest)
        if rank == 0 and len(done) == 3 and not told:
            raise TransportError("rank 2 -> rank 0: lost")
        return totals

    def each(training: Elastic, step: int) -> None:
        done.append(step)
        if rank == 2 and step == 4:
            leave(training)

    Elastic._agreement, Elastic.interrupt = agree, tell  # type: ignore[method-assign]
    StepStats.share = miss  # type: ignore[method-assign]
    trains(rank, port, folder, each=each)
    return done[-1]


@pytest.mark.dist
def test_a_loss_between_new_groups_and_a_new_agreement_holds_nobody_up(tmp_path: Path) -> None:
    """The new agreement is over at once: it would wait for the lost rank, and end the run."""
    assert ranks_of(tmp_path, 3, lost_before_they_agree)[0] > 2 * EPOCH


@pytest.mark.dist
@pytest.mark.parametrize(
    "last", [4, *(pytest.param(EPOCH * epochs, marks=pytest.mark.slow) for epochs in (1, 2))]
)
def test_a_stop_that_only_some_ranks_saw_is_for_all(tmp_path: Path, last: int) -> None:
    """Whether the others go on with a step, an evaluation, or the end of the run."""
    first, second, lost = ranks_of(tmp_path, 3, heard_by_one, last)
    assert lost["end"] is SystemExit
    assert first == {"end": TerminatedError, "done": last, "told": []}
    assert second == {"end": TerminatedError, "done": last, "told": [last]}
    assert files.newest(tmp_path / "run/checkpoints") == last


@pytest.mark.parametrize(
    ("found", "said"), [("", ""), ("it has rank 0", "this machine: it has rank 0"), (None, "")]
)
def test_a_machine_that_is_needed_says_what_for(
    found: str | None, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """None: the store is gone, so the run ends."""

    def needed_for() -> str:
        if found is None:
            raise DistNetworkError("Failed to recv, got 0 bytes")
        return found

    training: Any = SimpleNamespace(_elastic=SimpleNamespace(needed_for=needed_for))
    assert Elastic._may_leave(training) == (found == "")
    assert said in capfd.readouterr().err
