"""`thinpipe plan run.toml`: where to cut, how long a step takes, how many bits links can carry."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.cli_options import SetOption, reject
from thinpipe.launch.config.placement import check_placement
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.corpus import training_samples, with_sizes
from thinpipe.launch.cuts.auto_cuts import find_cuts
from thinpipe.launch.cuts.message_cost import measure_messages
from thinpipe.launch.cuts.profile import Blocks, measure_blocks
from thinpipe.launch.host.allocator import keep_freed_memory
from thinpipe.launch.host.links import MIN_RATE_BPS, format_rate, parse_rate, parse_time
from thinpipe.launch.host.network import Network
from thinpipe.launch.host.resources import rank_threads
from thinpipe.launch.host.words import WireKey, format_duration
from thinpipe.launch.memory.host import device_nbytes
from thinpipe.launch.memory.model import BlockRun, block_memory, rank_memory
from thinpipe.launch.plan.apply import apply_plan, boundary_text
from thinpipe.launch.plan.bits import Recommendation, recommend
from thinpipe.launch.plan.choice.choose import PlannedRun, choose
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.launch.plan.placement.cluster_files import read_cluster
from thinpipe.launch.plan.predict import predict, show_suggestions
from thinpipe.launch.plan.replicas import show_replicas
from thinpipe.launch.plan.tables import show_plan, show_recommendation
from thinpipe.pipeline.wire.told import DIRECTIONS

_SHOWN = 5  # layouts, the chosen one among them


def plan(  # noqa: PLR0913  # one parameter per option
    config_path: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run to plan.")],
    overrides: SetOption = None,
    network: Annotated[
        Path | None, typer.Option(metavar="NET.JSON", help="Links, as measured by doctor.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate of every link: 100mbit.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="One-way delay of every link: 20ms.")
    ] = None,
    speeds: Annotated[
        str | None,
        typer.Option(
            metavar="S0,S1,..", help="Speed of each stage's machine relative to this one."
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="GB0,GB1,..", help="Memory of each stage's machine (GB).")
    ] = None,
    place: Annotated[
        bool, typer.Option("--place", help="Choose stages, replicas and which device runs what.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="S", help="With --place: search this long, not 8 rounds."),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the plan into the run file.")
    ] = False,
) -> None:
    """Measure the blocks, predict a training step, and recommend bits per cut.

    With `cuts = "auto"` (and `stages`) it also finds the best cuts.
    """
    console = Console()
    try:
        config = with_sizes(load_config(config_path, overrides or []))
        if seconds is not None and not place:
            raise ValueError(f"--seconds = {seconds:g}: is for --place; add it, or leave it out")
        if place:
            _place(console, config, config_path, network, apply=apply, seconds=seconds)
            return
        links, machines = _links(config, network, rate, delay)
        numbers = _numbers(speeds, "--speeds", config.pipeline.stages)
        blocks, doubt = _blocks(console, config, numbers)
        limits = _numbers(memory, "--memory", config.pipeline.stages)
        config, advice = _plan(console, config, blocks, links, limits, machines=machines)
        if apply:
            measured = Network.read(network) if network else None
            _reject_doubtful(config_path, doubt, network, measured)
            _write(console, config, config_path, advice, known_links=bool(network or rate))
    except (ValueError, OSError, ImportError) as error:
        reject(error)


def _write(
    console: Console,
    config: RunConfig,
    path: Path,
    advice: Recommendation | None,
    *,
    known_links: bool,
) -> None:
    tables = _tables(config, advice.specs) if advice and known_links else None
    apply_plan(path, config.pipeline.cuts, tables)
    why_not = "none are recommended" if known_links else "give --rate or --network"
    bits = " and bits" if tables else f"; bits unchanged: {why_not}"
    cuts = list(config.pipeline.cuts)
    console.print(f"written to {path}: cuts {cuts}{bits}", soft_wrap=True)


def _place(
    console: Console,
    config: RunConfig,
    path: Path,
    network: Path | None,
    *,
    apply: bool,
    seconds: float | None,
) -> None:
    if network is None:
        raise ValueError("--place: needs the links; give --network NET.JSON (`doctor --save`)")
    cluster = read_cluster(network).seen_from(config.network.own_name())
    (blocks,), doubt = _blocks(console, config, [1.0])
    choices = choose(config, blocks, cluster, training_samples(config), seconds=seconds)
    show_choice(console, cluster, choices)
    if apply:
        _reject_doubtful(path, doubt, network, cluster.network(range(cluster.devices)))
        best = choices[0]
        pipeline = best.config.pipeline
        settings: dict[str, Any] = {
            "replicas": pipeline.replicas,
            "microbatches": pipeline.microbatches,
            "schedule": pipeline.schedule,
            "placement": best.hosts(cluster),
        }
        if pipeline.depth != config.pipeline.depth:
            settings["depth"] = pipeline.depth
        if config.pipeline.ranks is not None:
            settings["ranks"] = pipeline.pipeline_ranks
        check_placement(pipeline.model_validate(pipeline.model_dump() | settings))
        exchange = {"gradcomp": best.gradcomp} if pipeline.replicas > 1 else {}
        tables = _tables(best.config, best.specs) if pipeline.cuts else None
        apply_plan(path, pipeline.cuts, tables, {"pipeline": settings} | exchange)
        what = ", ".join(["cuts", *settings, *(["bits"] if tables else []), *exchange])
        console.print(f"written to {path}: {what}", soft_wrap=True)


def _plan(
    console: Console,
    config: RunConfig,
    blocks: Blocks,
    network: Network,
    limits: Sequence[float] | None,
    *,
    machines: Network,
) -> tuple[RunConfig, Recommendation | None]:
    """Print the plan; return the config with its cuts, and recommended bits if there are any.

    `network` is of a replica's ranks, `machines` of all replicas'.
    """
    limits = [1e9 * limit for limit in limits] if limits else None
    sequences = training_samples(config)
    if config.pipeline.auto_cuts:
        found = find_cuts(config, blocks, sequences, network=network, memory_limit=limits)
        config = config.with_cuts(found)
    memory = block_memory(config)
    needed = _needed(console, config, sequences, memory, limits)
    prediction = predict(config, blocks, measure_messages(config), network)
    show_plan(console, config, prediction, network, needed)
    if not config.pipeline.cuts:
        if machines.limited:
            show_replicas(console, config, blocks, None, machines, memory)
        return config, None
    advised = recommend(config, blocks, prediction, network)
    if advised is None:
        console.print(
            "recommended: the run file's own bits; no others are predicted to be faster by 5 %, or "
            "as fast with more bits",
            soft_wrap=True,
        )
    else:
        advice, prediction = advised
        show_recommendation(console, advice, prediction, network)
    show_suggestions(console, config, blocks, prediction, network)
    if machines.limited:
        show_replicas(console, config, blocks, prediction, machines, memory)
    if advised is None:
        return config, None
    console.print("recommended; --apply writes this to the run file:")
    console.print(boundary_text(_tables(config, advised[0].specs)), markup=False, soft_wrap=True)
    return config, advised[0]


def _needed(
    console: Console,
    config: RunConfig,
    sequences: int,
    memory: Sequence[BlockRun],
    limits: Sequence[float] | None,
) -> list[int]:
    models = rank_memory(config, memory)
    needed = device_nbytes(config, sequences, models)
    for layer in [layer for model in models for layer in model.uncounted][:1]:
        what = f"activations of layer {layer} are not counted"
        console.print(f"note: {what}: shapes do not determine them")
    for stage, limit in enumerate(limits or ()):
        rank = config.stage_ranks[stage]
        if needed[rank] > limit:
            raise ValueError(
                f"--memory: rank {rank}, which has stage {stage}, needs {needed[rank] / 1e9:.3g} "
                f'GB and its machine has {limit / 1e9:.3g}; move its cuts or use cuts = "auto"'
            )
    return needed


def _blocks(
    console: Console, config: RunConfig, speeds: Sequence[float] | None
) -> tuple[Blocks, str | None]:
    """Measured here, with threads and malloc settings of a rank that is alone on its machine; and
    why they may be wrong.
    """
    if config.pipeline.devices_per_rank > 1:
        raise ValueError(
            f"pipeline.devices_per_rank = {config.pipeline.devices_per_rank}: blocks are "
            "measured on one device; plan with --set pipeline.devices_per_rank=1"
        )
    keep_freed_memory()
    torch.set_num_threads(rank_threads(1))
    here = measure_blocks(config)
    if here.warning is not None:
        console.print(f"warning: {here.warning}", soft_wrap=True)
    speeds = speeds or [1.0] * config.pipeline.stages
    return [[block.on(speed) for block in here.costs] for speed in speeds], here.warning


def _reject_doubtful(
    path: Path, doubt: str | None, network: Path | None, links: Network | None
) -> None:
    """Do not write what measurements do not support; `links` are those of the file `network`."""
    nothing = f"--apply: nothing was written to {path}"
    if doubt is not None:
        raise ConfigError(
            f"{nothing}: block timings are unreliable ({doubt}), or write the printed "
            "tables into it by hand"
        )
    if network is None or links is None:
        return
    closed = [
        f"{source} -> {target}"
        for source, row in enumerate(links.rate_bps)
        for target, rate in enumerate(row)
        if rate is not None and rate <= MIN_RATE_BPS
    ]
    if closed:
        raise ConfigError(
            f"{nothing}: --network = {network} has links of no more than "
            f"{format_rate(MIN_RATE_BPS)}, which were closed or failing when they were measured "
            f"({', '.join(closed)}); measure again (`thinpipe doctor --save`), or write the "
            "printed tables into it by hand"
        )


def _links(
    config: RunConfig, path: Path | None, rate: str | None, delay: str | None
) -> tuple[Network, Network]:
    """Between the ranks of a replica, that with the slowest link; and between all ranks."""
    size = config.pipeline.pipeline_ranks
    ranks = size * config.pipeline.replicas
    if path is None:
        rate_bps = parse_rate(rate, "--rate") if rate else None
        latency_s = parse_time(delay, "--delay") if delay else 0.0
        uniform = partial(Network.uniform, rate_bps=rate_bps, latency_s=latency_s)
        return uniform(size), uniform(ranks)
    if rate or delay:
        raise ValueError(
            f"--network = {path}: already has rates and delays; leave out --rate and --delay"
        )
    machines = _of_ranks(Network.read(path), config.pipeline.placement, ranks, path)
    replicas = [machines.on(range(first, first + size)) for first in range(0, ranks, size)]
    return max(replicas, key=lambda replica: replica.slowest_s(10**6)), machines


def _of_ranks(
    network: Network, placement: Sequence[Sequence[str]], ranks: int, path: Path
) -> Network:
    if not placement:
        return network.for_ranks(ranks)
    names = [host.name for host in network.known]
    hosts = [host for row in placement for host in row]
    unknown = [host for host in dict.fromkeys(hosts) if host not in names]
    if unknown:
        raise ValueError(
            f"--network = {path}: has no host {', '.join(unknown)}, which pipeline.placement "
            "names; measure all of them (`thinpipe doctor --save`), or correct the placement"
        )
    return network.on([names.index(host) for host in hosts])


def _numbers(text: str | None, where: str, stages: int) -> list[float] | None:
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    sound = all(0 < number < math.inf for number in numbers)
    if not sound or len(numbers) not in (1, stages):
        unit = " of GB" if where == "--memory" else ""
        raise ValueError(
            f"{where} = {text!r}: give one positive number{unit}, or {stages} separated by commas"
        )
    return numbers * stages if len(numbers) == 1 else numbers


def _tables(config: RunConfig, specs: Mapping[WireKey, Spec]) -> list[dict[str, Any]]:
    """Boundary tables: a single one if all cuts are alike, otherwise one for each."""
    tables: list[dict[str, Any]] = []
    for cut in config.pipeline.cuts:
        guard = config.boundary_at(cut).guard.model_dump(mode="json", exclude_defaults=True)
        forward, backward = specs[cut, "forward"], specs[cut, "backward"]
        table = {"forward": _fields(forward), "backward": _fields(backward)}
        tables.append(table | ({"guard": guard} if guard else {}))
    if all(table == tables[0] for table in tables):
        return tables[:1]
    return [{"cut": cut} | table for cut, table in zip(config.pipeline.cuts, tables, strict=True)]


def _fields(spec: Spec) -> dict[str, Any]:
    """The fields of a run file; defaults are left out, except bits and format."""
    fields = spec.model_dump(mode="json", include={"bits", "format"})
    return {"kind": spec.kind} | fields | spec.model_dump(mode="json", exclude_defaults=True)


def show_choice(console: Console, cluster: Cluster, choices: Sequence[PlannedRun]) -> None:
    """Print the layout, what limits the step, and what the next best would cost."""
    best = choices[0]
    table = Table(title="which device runs what", title_justify="left")
    table.add_column("replica", justify="right")
    for rank in range(best.workload.ranks):
        table.add_column(f"stage {rank}", no_wrap=True)
    for replica, row in enumerate(best.placement.grid_RP):
        table.add_row(str(replica), *(_named(cluster, device) for device in row))
    console.print(table)
    cost = best.cost
    console.print(
        f"predicted step {format_duration(cost.step_s)}: {best.name}. Limit: {cost.limit} (passes "
        f"{format_duration(cost.passes_s)}, of which compute {format_duration(cost.compute_s)}; "
        f"exchange {format_duration(cost.exchange_s)})",
        soft_wrap=True,
    )
    if best.specs:
        console.print(f"cuts: {_sent(best)}", soft_wrap=True)
    if best.workload.replicas > 1:
        method = best.gradcomp["method"]
        options = [f"{key} = {value}" for key, value in best.gradcomp.get(method, {}).items()]
        console.print(f"exchange: {', '.join([method, *options])}", soft_wrap=True)
    idle = np.setdiff1d(np.arange(cluster.devices), best.placement.grid_RP)
    if len(idle):
        names = ", ".join(cluster.device_name(device) for device in idle[:8])
        console.print(f"idle: {names}{', ...' if len(idle) > 8 else ''}", soft_wrap=True)
    for other in choices[1:_SHOWN]:
        console.print(
            f"  {format_duration(other.cost.step_s)} with {other.name}: "
            f"{other.cost.step_s / cost.step_s - 1:+.0%}; limit: {other.cost.limit}",
            soft_wrap=True,
        )


def _sent(choice: PlannedRun) -> str:
    """`2 aqsgd 4-bit / direct 8-bit, 4 the same`: each cut, forward and backward."""
    texts: list[str] = []
    before = ""
    for cut in choice.config.pipeline.cuts:
        text = " / ".join(choice.specs[cut, way].words() for way in DIRECTIONS)
        texts.append(f"{cut}: {'the same' if text == before else text}")
        before = text
    return ", ".join(texts)


def _named(cluster: Cluster, device: int) -> str:
    site = cluster.hosts[cluster.host_of_D[device]].site
    return cluster.device_name(device) + f" ({site})" * bool(site)
