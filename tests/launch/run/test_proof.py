"""Silent corruption is found by comparing digests, named, and repaired or reported."""

import copy
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.training import TORCH_2_13, batch, config, start
from thinpipe.launch.checkpoint.reshard import module_of
from thinpipe.launch.run import proof
from thinpipe.launch.run.proof import CorruptionError, Proof, digest

pytestmark = pytest.mark.dist

AQSGD = [{"forward": {"kind": "aqsgd", "bits": 4}, "backward": {"kind": "direct", "bits": 8}}]


def _wrong_weights(rank: int, moment: bool) -> Any:
    built = start(config(pipeline={"cuts": [], "replicas": 2}, train={"batch_size": 8}))
    test = Proof(built, built.engine.transport, 2)
    built.engine.train_step(batch([rank, rank + 2]), 0)
    test.compare(2)
    (parameter, *_) = module_of(built.stages[0]).parameters()
    changed = built.optimizer.state[parameter]["exp_avg"] if moment else parameter.data
    if rank == 1:
        changed.view(-1).view(torch.int32)[3] ^= 1  # the lowest bit of one number
    assert not test.is_due(3)
    assert test.is_due(4)
    with pytest.raises(CorruptionError) as caught:
        test.compare(4)
    return str(caught.value)


def _wrong_remembered(rank: int) -> Any:
    shards = {"method": "qsdp", "weights": "differences", "keep_below": 64}
    built = start(config(pipeline={"cuts": [], "shards": 2}, shards=shards))
    test = Proof(built, built.engine.transport, 1)
    built.engine.train_step(batch([rank, rank + 2]), 0)
    assert built.shards is not None
    assert test.compare(1) == {}
    if rank == 1:
        built.shards.remembered[2].view(-1).view(torch.int32)[3] ^= 1
    with pytest.raises(CorruptionError) as caught:
        test.compare(2)
    return str(caught.value)


def _other_processor(rank: int) -> Any:
    built = start(config(pipeline={"cuts": [], "replicas": 2}, train={"batch_size": 8}))
    test, kinds = Proof(built, built.engine.transport, 1), ["an old one", "a new one"]
    proof.arithmetic = lambda _: kinds[rank]  # type: ignore[assignment]
    parameter = next(module_of(built.stages[0]).parameters())
    if rank == 1:
        parameter.data.view(-1)[0] += 1e-7
    logged: list[str] = []
    proof._log.warning = lambda text, *values: logged.append(text % values)  # type: ignore
    for step in (1, 2):
        test.compare(step)
    return logged


def _wrong_row(rank: int) -> Any:
    built = start(config(pipeline={"cuts": [2]}, boundary=copy.deepcopy(AQSGD)))
    test = Proof(built, built.engine.transport, 1)
    samples = batch([1, 2, 3, 4])
    built.engine.train_step(samples, 0)
    (memory,) = [c.codec.memory for c in built.engine.channels if c.codec.memory is not None]
    whole = test.compare(1)
    if rank == 1:  # what a faulty kernel would have put
        row = memory._store.row(3).clone()
        row[0] ^= 1
        memory._store.put(3, row)
    found = test.compare(2)
    losses = [built.engine.train_step(samples, step).loss for step in (1, 2)]
    return whole, found, len(memory), losses, test.compare(3)


def _all(rank: int) -> Any:
    return {
        "weights": _wrong_weights(rank, False),
        "optimizer state": _wrong_weights(rank, True),
        "row": _wrong_row(rank),
        "remembered": None if TORCH_2_13.args[0] else _wrong_remembered(rank),
        "processor": _other_processor(rank),
    }


@pytest.fixture(scope="module")
def found() -> Any:
    """What both ranks have found, by what was wrong."""
    one, other = run_ranks(2, _all)
    return {what: (one[what], other[what]) for what in one}


@pytest.mark.parametrize("what", ["weights", "optimizer state"])
def test_one_bit_of_a_replica_is_found_and_named_on_all_ranks(found: Any, what: str) -> None:
    for error in found[what]:
        assert error.startswith(
            f"after step 4 rank 1 and rank 0 hold different {what} of stage 0: "
        )
        assert "--resume --step N" in error


@TORCH_2_13
def test_what_shards_remember_differently_is_named(found: Any) -> None:
    for error in found["remembered"]:
        assert "cached shard weights at position 0 of replica 0" in error


def test_replicas_on_other_processors_are_not_compared_and_that_is_said_once(found: Any) -> None:
    (said, *more), silent = found["processor"]
    assert "different processors (an old one; a new one) may round differently" in said
    assert more == silent == []


def test_rows_that_differ_at_the_two_ends_are_forgotten_at_both(found: Any) -> None:
    (whole, repaired, held, losses, after), other = found["row"]
    assert whole == other[0] == {}
    assert repaired == other[1] == {"cut-2.forward": 4}
    assert held == other[2] == 4  # sent again since
    assert losses == other[3]
    assert after == other[4] == {}


def test_a_digest_is_of_every_bit() -> None:
    one = [torch.arange(6.0), torch.tensor(3.0)]
    other = [tensor.clone() for tensor in one]
    assert digest(one) == digest(other)
    other[1].view(torch.int32).bitwise_xor_(1)
    assert digest(one) != digest(other)
