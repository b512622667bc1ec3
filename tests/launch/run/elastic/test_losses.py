"""Replicas leave and come all the time, and the run learns what an undisturbed one learns."""

import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.launch.run.elastic.trained import as_rank, leave, members, write_run
from tests.waiting import PATIENCE_S
from thinpipe.launch.corpus import check_data
from thinpipe.launch.run.elastic.training import ElasticTraining

WORLD, LEAVES, EVERY = 4, 20, 16  # steps between two, of 400: the last is in before the end
SEEDS = range(int(os.environ.get("SEEDS", "1")))
OFTEN = "{interval=10, overlap=0}"  # by default they exchange more seldom than losses come
OPTIONS = {"diloco": OFTEN, "sparse_loco": OFTEN}
"""Of methods that do not have their defaults."""
METHODS = ["allreduce", "async_average", "bytegrad", "cocktail", "demo", "ef_gradients"]
METHODS += ["powersgd", "qadam", "topk", *OPTIONS]
MOST = {"cocktail": 0.1}
"""Nats on average, above .01: with it a lost replica has sent a fiftieth of its move per step."""
_PAUSE_S = 0.8
"""After a step while one comes: twenty newcomers take longer than 400 steps of this model."""


class Churn:
    """Has a replica leave and another come, every `EVERY` steps or so, as rank 0 says."""

    def __init__(self, store: TCPStore, rank: int, leaves: int, seed: int) -> None:
        self._store, self._rank, self._draw = store, rank, random.Random(seed)
        self._comes, self._end = WORLD, WORLD + leaves

    def each(self, training: ElasticTraining, step: int) -> None:
        """After a step of any rank."""
        while self._store.check([f"in {self._comes}"]):
            self._comes += 1
        if self._store.check([f"come {self._comes}"]):
            time.sleep(_PAUSE_S)
            return
        is_due = self._comes < self._end and step >= EVERY * (self._comes - WORLD) + 5
        if self._rank == 0 and is_due:
            others = sorted({*training._elastic.hosts} - {0})
            self._store.set(f"leave {self._draw.choice(others)}", "")
            self._store.set(f"come {self._comes}", "")


def held_out(
    rank: int, port: int, folder: str, method: str, seed: int, leaves: int
) -> tuple[float, int, int]:
    """The loss in the end, how many generations there were, and how many replicas in the end."""
    store, number = TCPStore("127.0.0.1", port, is_master=False), [0, 0]
    churn, loss = Churn(store, rank, leaves, seed), float("nan")
    options = OPTIONS.get(method, "{}")
    settings = [f"gradcomp.method={method}", f"gradcomp.{method}={options}", f"run.seed={seed}"]
    settings += ["pipeline.replicas=4", "train.epochs=1", "data.eval_sequences=240"]
    settings += ["train.batch_size=8", "data.train_sequences=3200", "pipeline.peer_timeout_s=200"]
    if rank >= WORLD:
        settings.append(f"run.folder={folder}/{rank}")
        store.wait([f"come {rank}"], timedelta(seconds=PATIENCE_S * 10))
    with (
        suppress(SystemExit),
        as_rank(rank, port, folder, *settings, world=WORLD, comes=rank >= WORLD) as run,
    ):
        corpus = check_data(run.config)
        for _ in run.epochs(run.config.train.epochs):
            for batch in run.batches_of(corpus.train, run.config.train.batch_size):
                record, training = run.step(batch), run._training
                assert isinstance(training, ElasticTraining)
                store.set(f"in {rank}", "")
                if store.check([f"leave {rank}"]):
                    leave(training)
                churn.each(training, record.step)
        loss = run.evaluate_on(corpus.evaluation)["loss"]
        number = [training._elastic._generation, len(training._elastic.hosts)]
    return loss, number[0], number[1]


def trained(folder: Path, method: str, seed: int, leaves: int) -> Any:
    folder.mkdir()
    write_run(folder, lines=6000)
    arguments = str(folder), method, seed, leaves
    return members(WORLD + leaves, held_out, *arguments, limit_s=900)[0]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("method", METHODS)
def test_twenty_leaves_and_joins_cost_no_loss(
    tmp_path: Path, method: str, record_property: Callable[[str, object], None]
) -> None:
    """Of 400 steps, held out; SEEDS=3 for three seeds."""
    gaps = []
    for seed in SEEDS:
        calm, *_ = trained(tmp_path / f"calm{seed}", method, seed, 0)
        loss, generations, replicas = trained(tmp_path / f"{seed}", method, seed, LEAVES)
        record_property(f"seed {seed}", f"{calm:.4f} undisturbed, {loss:.4f}, {generations}")
        assert (generations >= LEAVES, replicas) == (True, WORLD)
        gaps.append(loss - calm)
    assert mean(gaps) < MOST.get(method, 0.01), gaps
