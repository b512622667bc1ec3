"""Ranks of a small elastic run that trains, each in a process that a test has forked."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from tests import texts
from tests.ranks import run_ranks
from thinpipe.launch.checkpoint.resume import Resume
from thinpipe.launch.config.run import load_config
from thinpipe.launch.corpus import check_data
from thinpipe.launch.net.ranks.network import JOINS
from thinpipe.launch.net.ranks.session import SHOW, TerminatedError
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.launch.run.run import RankRun

RUN = """
[run]
name = "elastic"
folder = "{folder}"
[model]
layers = {layers}
width = 32
heads = 2
context = 32
[data]
path = "{text}"
sequence_length = 32
train_sequences = 120
eval_sequences = 6
[pipeline]
device = "cpu"
replicas = 3
peer_timeout_s = 20
[train]
epochs = 2
batch_size = 6
warmup_steps = 2
[checkpoint]
keep = 99
[gradcomp]
method = "ef_gradients"
ef_gradients = {{ bucket_mb = 0.02, fraction = 0.1 }}
[elastic]
min_replicas = 1
"""


def members(
    count: int, function: Callable[..., Any], *args: Any, limit_s: float = 300
) -> list[Any]:
    """As `run_ranks`; `function(rank, port, *args)` also gets the port of a store outside them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(count, function, store.port, *args, limit_s=limit_s)


def write_run(folder: Path, *, layers: int = 2, lines: int = 2000) -> None:
    """Its text and run file."""
    texts.write_run(folder, RUN, lines=lines, layers=layers)


def ranks_of(folder: Path, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`members` of a run in this folder: `function(rank, port, folder, *args)`."""
    write_run(folder)
    return members(count, function, str(folder), *args)


@contextmanager
def as_rank(
    rank: int,
    port: int,
    folder: str,
    *changes: str,
    world: int = 3,
    comes: bool = False,
    apart: bool = False,
) -> Iterator[RankRun]:
    """This process is that rank, or one that `comes` later; the test holds the store at `port`.

    Ranks that are `apart` are each a machine.
    """
    dist.destroy_process_group()
    if comes:
        os.environ[JOINS] = f"newcomer{rank}"
        rank, world = 0, 1
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0" if apart else str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": "3",  # as many threads in all: they round alike
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "THINPIPE_ADDRESS": "127.0.0.1",
        SHOW: "-1",
    }
    config = load_config(Path(folder) / "run.toml", changes)
    with RankRun(config, Resume(False), show=-1) as run:
        yield run


def train(run: RankRun, each: Callable[[ElasticTraining, int], Any]) -> None:
    """All its steps; `each` is called after every one, with how many are done."""
    corpus = check_data(run.config)
    for _ in run.epochs(run.config.train.epochs):
        for batch in run.batches_of(corpus.train, run.config.train.batch_size):
            record, training = run.step(batch), run._training
            assert isinstance(training, ElasticTraining)
            each(training, record.step)
        run.evaluate_on(corpus.evaluation)


def trains(
    *place: Any,
    each: Callable[[ElasticTraining, int], Any],
    ends: Sequence[type[BaseException]] = (TerminatedError, SystemExit),
    **how: Any,
) -> None:
    """As `as_rank` and `train`, until one of `ends` is raised: this rank leaves, or all stop."""
    with suppress(*ends), as_rank(*place, **how) as run:
        train(run, each)


def leave(training: ElasticTraining) -> NoReturn:
    """This rank is lost."""
    training._elastic.leave(f"rank {training._elastic.number} is gone")
    raise SystemExit


def stop_asked(training: ElasticTraining, store: Store, key: str) -> None:
    """Stop all, once, when a key is in the store."""
    if not training.stopping and store.check([key]):
        training.stop(whole=True)
