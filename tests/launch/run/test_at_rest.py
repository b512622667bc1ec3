"""A bit that flips in weights or optimizer state from step to step is found without a copy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.ranks import Ranks
from tests.training import batch, config, share, start
from thinpipe.gradcomp.registry import method_names
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.contents import collect, snapshot
from thinpipe.launch.checkpoint.reshard import module_of
from thinpipe.launch.checkpoint.state import Checkpoints
from thinpipe.launch.config.sections import CheckpointConfig
from thinpipe.launch.distributed.session import Session
from thinpipe.launch.run import at_rest
from thinpipe.launch.run.at_rest import AtRest, CorruptionError

pytestmark = pytest.mark.dist


def flip(tensor: torch.Tensor) -> None:
    """The lowest bit of one number."""
    tensor.detach().view(-1).view(torch.int32)[3] ^= 1


def _tensor(built: Any, moment: bool) -> torch.Tensor:
    parameter = list(module_of(built.stages[0]).parameters())[-1]
    found: torch.Tensor = built.optimizer.state[parameter]["exp_avg"] if moment else parameter
    return found


def _flipped(rank: int, moment: bool, folder: str) -> Any:
    """Rank 1 of two stages has a bit flip after step 2."""
    built = start(config())
    watch = AtRest(built, 1.0, rank=rank)
    for step in (0, 1):
        built.engine.train_step(batch([1, 2, 3, 4]), step)
        watch.take(step + 1, 60.0, saves=False)
    session = Session(HashStore(), built.engine.transport, 7, 0, None)
    root = Path(folder) / f"disk-{rank}"
    facts = {"config": config().shared()}
    saves = Checkpoints(root, CheckpointConfig(), built, session, facts)
    good = saves.save(1, watch.seal())
    if rank == 1:
        flip(_tensor(built, moment))
    bad = saves.save(2, watch.seal())
    try:
        watch.compare()
    except CorruptionError as error:
        return good, bad, files.steps(root), str(error)
    return good, bad, files.steps(root), watch.words()


@pytest.mark.parametrize(("moment", "what"), [(False, ""), (True, "exp_avg of ")])
def test_a_flipped_bit_is_named_before_the_next_step_and_never_saved(
    ranks: Ranks, tmp_path: Path, moment: bool, what: str
) -> None:
    sound, faulty = ranks(2, _flipped, moment, str(tmp_path))
    assert sound[:3] == faulty[:3] == (True, False, [1])
    assert sound[3].startswith("weights and optimizer state were verified in memory: 100% of them")
    assert faulty[3].startswith(f"rank 1: {what}")
    assert "changed in memory after step 2, when nothing may change them" in faulty[3]


def _in_turns(_rank: int) -> Any:
    at_rest._PIECE_NBYTES = 512
    built = start(config(pipeline={"cuts": []}))
    watch, found = AtRest(built, 1e-9, rank=0), 0
    for step in range(200):
        built.engine.train_step(batch([1, 2]), step)
        watch._left_s = 0.0  # the piece before is paid for
        watch.take(step + 1, 1e-9, saves=False)
        assert len(watch._taken) == 1  # there is time for no more
        flip(_tensor(built, moment=True))
        try:
            watch.compare()
        except CorruptionError:
            found += 1
    watch.take(200, 1e-9, saves=False)
    assert not watch._taken  # the last one took more than the share of many such steps
    watch.take(200, 1e-9, saves=True)
    return found, sum(piece.data.nbytes for piece, _ in watch._taken) // 512


def test_with_little_time_pieces_take_turns(ranks: Ranks) -> None:
    ((found, pieces),) = ranks(1, _in_turns)
    assert found == 200 // pieces or found == 200 // pieces + 1


def _transposed(_rank: int) -> Any:
    """A weight that does not lie in memory as its indices say, as with channels last."""
    at_rest._PIECE_NBYTES = 128
    built = start(config(pipeline={"cuts": []}))
    weight = next(p for p in module_of(built.stages[0]).parameters() if p.ndim == 2)
    weight.data = weight.detach().t().contiguous().t()
    assert not weight.is_contiguous()
    watch = AtRest(built, 1.0, rank=0)
    watch.take(1, 60.0, saves=True)
    good = watch.seal()(snapshot(collect(built)))
    weight.detach().t().view(-1).view(torch.int32)[-1] ^= 1
    bad = watch.seal()(snapshot(collect(built)))
    try:
        watch.compare()
    except CorruptionError as error:
        return good, bad, str(error)
    return good, bad, None


def test_a_flip_in_a_tensor_that_is_not_contiguous_is_found(ranks: Ranks) -> None:
    ((good, bad, found),) = ranks(1, _transposed)
    assert good is None
    assert "is not as the step left it" in bad
    assert "changed in memory after step 1" in found


def _every_method(rank: int) -> None:
    for name in method_names():
        _hold(name, rank)


def _hold(name: str, rank: int) -> None:
    """Some steps with a method, all of them watched."""
    pipeline = {"cuts": [], "replicas": 2, "microbatches": 2}
    built = start(config(pipeline=pipeline, gradcomp={"method": name}, train={"batch_size": 4}))
    watch = AtRest(built, 1.0, rank=rank)
    for step in range(3):
        built.engine.train_step(share(batch([1, 2, 3, 4]), rank, 2), step)
        watch.take(step + 1, 60.0, saves=True)
        copied = snapshot(collect(built))
        assert watch.seal()(copied) is None
        with built.sync.global_parameters():
            pass
    watch.compare()


def test_no_method_changes_what_is_watched(ranks: Ranks) -> None:
    ranks(2, _every_method)
