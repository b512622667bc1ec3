"""Every boolean and every choice of what is exchanged starts, trains and is saved.

What there is to choose is read from the settings themselves: one that is new is tried, too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from tests.ranks import run_ranks
from tests.training import RAW, TORCH_2_13, batch, config, share, start
from thinpipe.gradcomp.registry import load_method, method_names
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.launch.config.boundary import BoundaryConfig
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.memory.host import check_host
from thinpipe.launch.trained.source import check_start

pytestmark = pytest.mark.dist

Options = dict[str, Any]
STEPS = 3
SOON = {"interval": 2, "overlap": 1, "warmup_steps": 1, "rank": 1}
"""So that a few steps see every phase of a method."""


def choices(annotation: Any) -> list[Any]:
    """What a setting may be, of what can be listed."""
    if annotation is bool:
        return [False, True]
    if get_origin(annotation) is Literal:
        return [*get_args(annotation)]
    return [value for part in get_args(annotation) for value in choices(part)]


def variants(
    kind: type[BaseModel], make: Callable[[Options], RunConfig]
) -> Iterator[tuple[str, RunConfig]]:
    """A run for every choice, with the first other choice that it needs next to it, if any."""
    singles = [
        {name: value}
        for name, field in kind.model_fields.items()
        for value in choices(field.annotation)
        if value != field.default  # the first run has all defaults
    ]
    for single in [{}, *singles]:
        for other in [{}, *singles]:
            try:
                run = make({**other, **single})
            except ValidationError:
                continue
            yield str(single), run
            break
        else:
            raise AssertionError(f"{kind.__name__}: {single}")


def train(rank: int, runs: Sequence[tuple[str, RunConfig]]) -> None:
    """Each in turn, in the same processes."""
    for name, run in runs:
        try:
            built = start(run)
            dp_rank = built.engine.transport.mesh.dp_rank
            for step in range(STEPS):
                item = share(batch([1, 2, 3, 4]), dp_rank, run.pipeline.dp_size)
                assert not built.engine.train_step(item, step).skipped
            built.sync.state_dict()
            built.sync.finish()
            built.engine.eval_step(item, STEPS, compressed=bool(run.pipeline.cuts))
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def all_start(runs: Sequence[tuple[str, RunConfig]]) -> None:
    """As `thinpipe train` does: what a run needs is counted first."""
    for name, run in runs:
        try:
            check_start(run)
            check_host(run, 4, range(run.world_size))
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    run_ranks(2, train, runs)


def small(**sections: Any) -> RunConfig:
    pipeline = {"cuts": [], "microbatches": 2, **sections.pop("pipeline")}
    return config(model={"layers": 2}, pipeline=pipeline, train={"batch_size": 4}, **sections)


@pytest.mark.slow
def test_every_choice_of_every_method_starts() -> None:
    runs = []
    for method in method_names():
        fields = load_method(method).Config.model_fields
        soon = {name: value for name, value in SOON.items() if name in fields}

        def make(options: Options, method: str = method, soon: Options = soon) -> RunConfig:
            exchange = {"method": method, method: {**soon, **options}}
            return small(pipeline={"replicas": 2}, gradcomp=exchange)

        found = variants(load_method(method).Config, make)
        runs += [(f"{method} {name}", run) for name, run in found]
    all_start(runs)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_every_choice_of_every_boundary_starts(way: str) -> None:
    runs = []
    for kind in get_args(BoundaryConfig.model_fields[way].annotation):
        tag = kind.model_fields["kind"].default

        def make(options: Options, tag: str = tag) -> RunConfig:
            both = {"forward": RAW, "backward": RAW, way: {"kind": tag, **options}}
            return small(pipeline={"cuts": [1]}, boundary=[both])

        runs += [(f"{tag} {name}", run) for name, run in variants(kind, make)]
    all_start(runs)


@pytest.mark.slow
@TORCH_2_13
def test_every_choice_of_shards_starts() -> None:
    def make(options: Options) -> RunConfig:
        return small(pipeline={"shards": 2}, shards=options)

    all_start([*variants(ShardsConfig, make)])
