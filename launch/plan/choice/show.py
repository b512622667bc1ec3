"""`thinpipe plan --place`: the chosen layout with its reasons."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from thinpipe.launch.host.words import format_duration
from thinpipe.launch.plan.choice.choose import PlannedRun
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.pipeline.wire.told import DIRECTIONS

_SHOWN = 5


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
        options = best.gradcomp.get(method, {})
        what = ", ".join([method, *(f"{key} = {value}" for key, value in options.items())])
        console.print(f"exchange: {what}", soft_wrap=True)
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
