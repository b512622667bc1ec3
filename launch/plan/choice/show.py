"""`thinpipe plan --place`: the chosen layout with its reasons, and a picture of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from thinpipe.launch.host.words import format_bytes, format_duration
from thinpipe.launch.plan.choice.choose import PlannedRun
from thinpipe.launch.plan.placement.cluster import Cluster, Floats
from thinpipe.launch.plan.placement.step import link_nbytes
from thinpipe.pipeline.wire.header import DIRECTIONS

_SHOWN = 5


def show_choice(console: Console, cluster: Cluster, choices: Sequence[PlannedRun]) -> None:
    """Print the layout, what limits the step, and what the next best would cost."""
    best = choices[0]
    table = Table(title="which device runs what", title_justify="left")
    table.add_column("replica", justify="right")
    for rank in range(best.workload.ranks):
        table.add_column(f"stage {rank}", no_wrap=True)
    for replica, row in enumerate(best.placement.grid_RP):
        cells = [f"{cluster.device_name(d)} ({_site(cluster, d)})" for d in row]
        table.add_row(str(replica), *cells)
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
    curve = best.placement.curve
    falls = ", ".join(f"{format_duration(at.cost)} ({format_duration(at.seconds)})" for at in curve)
    console.print(f"best step found (after this long): {falls}", soft_wrap=True)
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


def draw_choice(path: Path, cluster: Cluster, choice: PlannedRun) -> None:
    """Left the devices in their sites with the pipelines, right the bytes between sites."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    sites = list(dict.fromkeys(cluster.sites))
    figure = Figure(figsize=(14, 7), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    used = {int(d): (r, p) for (r, p), d in np.ndenumerate(choice.placement.grid_RP)}
    place = _places(cluster, sites, used)
    for number, site in enumerate(sites):
        own = [place[d] for d in range(cluster.devices) if _site(cluster, d) == site]
        x, y = np.mean(own, axis=0)
        left.annotate(site, (x, y), xytext=(0, -4), textcoords="offset points", ha="center")
        radius = 0.1 + max(float(np.hypot(px - x, py - y)) for px, py in own)
        left.add_patch(Circle((x, y), radius, color=f"C{number % 10}", alpha=0.12))
    for replica, row in enumerate(choice.placement.grid_RP):
        points = np.array([place[device] for device in row])
        left.plot(*points.T, color=f"C{replica % 10}", alpha=0.7, label=f"replica {replica}")
    for device, (x, y) in enumerate(place):
        rank = used.get(device)
        left.scatter(
            x, y, s=120, color="lightgrey" if rank is None else f"C{rank[0] % 10}", zorder=3
        )
        left.text(x, y, "" if rank is None else str(rank[1]), ha="center", va="center", zorder=4)
    left.set_aspect("equal")
    left.set_axis_off()
    left.set_title(f"{choice.name}\nstages by number, replicas by colour; grey: idle")
    if choice.workload.replicas <= 10:
        left.legend(loc="lower left", fontsize="small")
    busy = _busy(cluster, choice, sites)
    image = right.imshow(busy, cmap="Blues", vmin=0)
    figure.colorbar(image, ax=right, label="bytes in a step")
    right.set_xticks(range(len(sites)), sites, rotation=45, ha="right")
    right.set_yticks(range(len(sites)), sites)
    if len(sites) <= 10:
        for a in range(len(sites)):
            for b in range(len(sites)):
                colour = "white" if busy[a, b] > busy.max() / 2 else "black"
                text = format_bytes(round(busy[a, b]))
                right.text(b, a, text, ha="center", fontsize="small", color=colour)
    right.set_title(f"from (row) to (column); step {format_duration(choice.cost.step_s)}")
    figure.savefig(path)


def _places(cluster: Cluster, sites: Sequence[str], used: Mapping[int, tuple[int, int]]) -> Floats:
    """[D, 2]: sites on a circle, the devices of each on a smaller one, neighbours side by side."""
    place = np.empty((cluster.devices, 2))
    for number, site in enumerate(sites):
        own = [d for d in range(cluster.devices) if _site(cluster, d) == site]
        own.sort(key=lambda device: used.get(device, (cluster.devices, device)))
        angle = 2 * np.pi * number / len(sites)
        radius = min(0.8, 2.5 / len(sites)) * (len(own) > 1)
        around = 2 * np.pi * np.arange(len(own)) / len(own)
        place[own, 0] = 2 * np.cos(angle) + radius * np.cos(around)
        place[own, 1] = 2 * np.sin(angle) + radius * np.sin(around)
    return place


def _busy(cluster: Cluster, choice: PlannedRun, sites: Sequence[str]) -> Floats:
    sent_HH = link_nbytes(cluster, choice.workload, choice.placement.grid_RP)
    of = np.array([sites.index(site) for site in cluster.sites])
    busy = np.zeros((len(sites), len(sites)))
    np.add.at(busy, (of[:, None], of[None]), sent_HH)
    return busy


def _site(cluster: Cluster, device: int) -> str:
    return cluster.sites[int(cluster.host_of_D[device])]
