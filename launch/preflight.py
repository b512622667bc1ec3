"""May this run start? One answer for `train`, its dry run, several machines, `doctor`, `init`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.run_folder import check_contents, check_folder, earlier_runs
from thinpipe.launch.config.cli_options import share_of
from thinpipe.launch.config.placement import hosts_by_rank
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.corpus import Corpus, check_data, with_sizes
from thinpipe.launch.host.device import check_gpus, choose_device
from thinpipe.launch.host.packages import check_writers
from thinpipe.launch.memory.host import check_host
from thinpipe.launch.optimizer import check_optimizer
from thinpipe.launch.trained.source import check_start

Share = Sequence[int]
"""Ranks that one machine has."""


class Ready(NamedTuple):
    """A run that may start: its settings, with the sizes of its messages, and its samples."""

    config: RunConfig
    corpus: Corpus


def shares_here(config: RunConfig, machines: int, ranks: int | None) -> list[Share]:
    """The ranks that this machine may have: one share if they are known, else each possible one.

    Machines are numbered when they meet; shares that need the same are listed once.

    Raises:
        ValueError: `--nnodes` or `--ranks` do not fit the run.
    """
    world = config.world_size
    placed = hosts_by_rank(config.pipeline.placement) if machines > 1 else ()
    if placed:
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(placed):
            by_host.setdefault(host, []).append(rank)
        own = by_host.get(config.network.own_name())
        if own and ranks not in (None, len(own)):
            raise ConfigError(
                f"--ranks = {ranks}: pipeline.placement gives this machine {len(own)}; remove "
                "--ranks"
            )
        return [own] if own else [*by_host.values()]
    count = share_of(world, machines, ranks)
    starts = range(0, world - count + 1, count if ranks is None else 1)
    found: dict[tuple[int, ...], Share] = {}
    for share in (range(start, start + count) for start in starts):
        found.setdefault(tuple(config.mesh(rank).position for rank in share), share)
    return [*found.values()]


def check(
    config: RunConfig,
    shares: Sequence[Share],
    *,
    resume: bool = False,
    joins: bool = False,
    show: Callable[[Ready], None] | None = None,
    room: bool = True,
) -> Ready:
    """Check all that can be known before there are ranks. With `show` the run is only counted:
    that comes before room is checked, and a GPU need not be here. Without `room` its ranks find out
    whether there is any.
    """
    ready = check_settings(config, shares, resume=resume, counted=show is not None)
    if not (resume or joins):
        check_contents(config.run.path)
    if show is None:
        choose_device(config.pipeline.device)
        check_gpus(config.pipeline.device, config.pipeline.devices_per_rank, len(shares[0]))
    else:
        show(ready)
    if room:
        check_room(ready, shares)
    return ready


def check_settings(
    config: RunConfig, shares: Sequence[Share], *, resume: bool = False, counted: bool = False
) -> Ready:
    """Check everything but what this machine has of devices, memory and disk.

    Large data of a run that is only `counted` are not read as a whole.
    """
    check_folder(config.run.path)
    if all(0 in share for share in shares):  # rank 0 writes
        check_writers(config.report.writers)
    config.model.check_files()
    if config.data.packs:
        config.model.check_packing()
    in_bf16 = config.model.trains_in_bf16
    check_optimizer(config.train, config.method, in_bf16=in_bf16)
    check_start(config)
    if len(shares[0]) == config.world_size:  # others may have what this machine lacks
        _check_resume(config, resume=resume)
    corpus = check_data(config, counted=counted)
    return Ready(with_sizes(config), corpus)


def check_room(ready: Ready, shares: Sequence[Share]) -> list[str]:
    """Check that this machine has the memory and disk for one of the shares; what else to know.

    Raises:
        ValueError: it has not; what to change.
    """
    problems = []
    for share in shares:
        try:
            return check_host(ready.config, len(ready.corpus.train), share)
        except ValueError as error:
            problems.append(error)
    raise problems[0]


def _check_resume(config: RunConfig, *, resume: bool) -> None:
    if resume and not (config.run.path / "checkpoints").is_dir():
        remedy = "remove --resume"
        for earlier in earlier_runs(config.run.path)[-1:]:
            remedy += f", or rename {earlier}, an earlier run, to {config.run.path}"
        raise CheckpointError(f"{config.run.path}: no checkpoints to resume from; {remedy}")
