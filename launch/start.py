"""Starts `thinpipe train` and `thinpipe run` once their options are read.

Ranks alone import what trains, and `run`, whose program says what it needs.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from thinpipe.launch import preflight
from thinpipe.launch.checkpoint.resume import Resume, after_restart
from thinpipe.launch.config.cli_options import Machines, is_rank, reject, share_of, started_by_torch
from thinpipe.launch.config.placement import hosts_by_rank
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.allocator import keep_freed_memory
from thinpipe.launch.memory.host import show_host
from thinpipe.launch.memory.rows import memory_notices, plan_memory, show_memory
from thinpipe.launch.net.machines import Joins
from thinpipe.launch.net.ranks.elastic import Nodes, run_local, run_node
from thinpipe.launch.net.ranks.fork_server import end_with_parent
from thinpipe.launch.net.ranks.session import SHOW

Main = Callable[[], None]


def start_run(
    main: Main,
    config_path: Path,
    overrides: Sequence[str],
    machines: Machines,
    resume: Resume,
    *,
    show: int,
    dry_run: bool,
) -> NoReturn:
    """Train, as all ranks of this machine or, under torchrun, as one; or count what it needs.

    Each rank calls `main`, with this process's arguments.
    """
    try:
        config = load_config(config_path, overrides)
        if show >= config.world_size and not dry_run:
            raise ConfigError(f"--show = {show}: use a rank below {config.world_size}, or -1")
        if is_rank() and not dry_run:
            _check_supervised(config)
        else:
            _start_here(main, config, machines, resume, show=show, dry_run=dry_run)
    except (ValueError, OSError, ImportError) as error:
        reject(error)
    from thinpipe.launch.rank import train_as_rank

    train_as_rank(config, after_restart(resume), show=show)


def _start_here(  # as `start_run`
    main: Main, config: RunConfig, machines: Machines, resume: Resume, *, show: int, dry_run: bool
) -> NoReturn:
    _check_elastic(config, machines)
    shares = preflight.shares_here(config, machines.count, machines.ranks)
    if machines.join is not None:
        shares = _shares_of_newcomer(config, machines)
    if dry_run:
        shown = partial(_show_needs, shares, max(0, show))
        joins = machines.join is not None
        preflight.check(config, shares, resume=resume.wanted, joins=joins, show=shown)
        sys.exit()
    _check(config, machines, shares, resume)
    sys.exit(_start(main, config, len(shares[0]), machines, show=show))


def _check(
    config: RunConfig, machines: Machines, shares: Sequence[preflight.Share], resume: Resume
) -> None:
    joins, is_spare = machines.join is not None, config.checkpoint.ram_every is not None
    # the ranks of a whole replica check it, too, before they meet those of the run: in less time
    later = joins and (is_spare or len(shares) == 1)
    wanted = resume.wanted
    ready = preflight.check(config, shares, resume=wanted, joins=joins, room=not later)
    for share in shares if joins and is_spare else ():  # it cannot choose its place
        preflight.check_room(ready, [share])


def _check_supervised(config: RunConfig) -> None:
    if config.goes_on_by and not started_by_torch():
        raise ConfigError(
            f"{config.goes_on_by}: nobody would tell the others of the loss of this rank, which "
            "was started by itself; add --nnodes and --rdzv"
        )


def _shares_of_newcomer(config: RunConfig, machines: Machines) -> list[preflight.Share]:
    """The ranks that a machine which joins may have: never 0, which writes, so those of a second
    replica, or of a pipeline without replicas the ones after the first.
    """
    end = whole = config.pipeline.pipeline_ranks
    first, ranks = 1, machines.ranks or 1
    if config.checkpoint.ram_every is None:
        first, end, ranks = whole, 2 * whole, machines.ranks or whole
    if ranks > end - first:
        raise ConfigError(
            f"--ranks = {ranks}: with --join a machine brings {end - first} or fewer ranks"
        )
    return [range(start, start + ranks) for start in range(first, end - ranks + 1)]


def _check_elastic(config: RunConfig, machines: Machines) -> None:
    """Check that a run on several machines can go on without one."""
    what = config.goes_on_by
    if machines.join is not None and not what:
        raise ConfigError(
            f"--join = {machines.join}: a run that others can join has elastic.min_replicas or, "
            "without replicas, checkpoint.ram_every; use its own run file"
        )
    if machines.alone and config.checkpoint.ram_every is not None:
        raise ConfigError(
            f"{what}: on one machine there is no other to take a place; remove it, or start the "
            "run on several (--nnodes, --rdzv)"
        )
    if machines.alone or not what:
        return
    if config.network.trusted:
        raise ConfigError(
            f"{what}: on several machines it needs the run's own network, by which a lost machine "
            "is noticed; set network.trusted = false, with a key"
        )
    if machines.max_restarts:
        raise ConfigError(
            f"--max-restarts = {machines.max_restarts}: with {what} a restart would wait for "
            "machines that are lost; leave it out"
        )


def start_program(
    main: Main, script: Path, own: Sequence[str], machines: Machines, *, show: int
) -> NoReturn:
    """Run your own program on all ranks of this machine, or under torchrun as one."""
    from thinpipe.launch.run.script import look_at, run_as_rank

    if is_rank():
        end_with_parent()
        keep_freed_memory()
        os.environ.setdefault(SHOW, str(show))
        run_as_rank(script, own)
    try:
        needs = look_at(script, own)
        if machines.alone:
            restarts = machines.max_restarts
            sys.exit(run_local(main, sys.argv[1:], needs.world_size, max_restarts=restarts))
        nodes = Nodes(machines.count, machines.rdzv or "", machines.max_restarts, needs.join_s)
        processes = share_of(needs.world_size, nodes.count, machines.ranks)
        sys.exit(run_node(main, sys.argv[1:], processes, nodes, needs.network))
    except (ValueError, OSError, ImportError) as error:
        reject(error)


def _start(main: Main, config: RunConfig, processes: int, machines: Machines, *, show: int) -> int:
    if show >= 0:
        ranks = "1 rank" if processes == 1 else f"{processes} ranks"
        typer.echo(f"starting {ranks} on this machine")
    if machines.alone:
        return run_local(main, sys.argv[1:], config.world_size, max_restarts=machines.max_restarts)
    join_s = config.pipeline.peer_timeout_s
    if machines.join is not None:
        joins: Joins = "now" if config.checkpoint.ram_every is None else "later"
        nodes = Nodes(1, machines.join, 0, join_s, joins=joins)
    else:
        placed = hosts_by_rank(config.pipeline.placement)
        nodes = Nodes(machines.count, machines.rdzv or "", machines.max_restarts, join_s, placed)
    return run_node(main, sys.argv[1:], processes, nodes, config.network)


def _show_needs(shares: Sequence[preflight.Share], samples: int, ready: preflight.Ready) -> None:
    config, corpus = ready
    sequences, console = len(corpus.train), Console(highlight=False)
    if samples:
        from thinpipe.launch.data.chat.show import show_examples
        from thinpipe.launch.data.tokenizer import load_tokenizer

        if config.data.factory is not None:
            raise ConfigError(f"--show = {samples}: {config.data.source} returns no text")
        decode = partial(load_tokenizer(config.data.tokenizer).decode, special=True)
        show_examples(console, corpus.train.batch(range(min(samples, sequences))), decode)
    ends = plan_memory(config, sequences)
    show_memory(console, config, ends, shares)
    for share in shares:
        show_host(console, config, sequences, share)
    for note in (*config.notices(), *corpus.notes, *memory_notices(ends)):
        typer.echo(note)
