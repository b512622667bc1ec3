"""`python docs/figures.py`: the pictures of these pages.

Timelines come from the planner's simulator; speeds are those that a page of results measured.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.host.network import Network
from thinpipe.launch.plan.placement.events import simulate
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.launch.view.report.timeline import timeline_svg
from thinpipe.pipeline.wire.header import HEADER_NBYTES

_IMAGES = Path(__file__).parent / "images"
_RESULTS = Path(__file__).parents[1] / "benchmarks/results/links_paper_shaped_cpu_202611.md"
_VALUES = 1024 * 1600
_SVG = "http://www.w3.org/2000/svg"
_COLORS = ("#0072b2", "#d55e00", "#009e73")
_RATES = ("100 Mbit/s", "300 Mbit/s", "500 Mbit/s", "1 Gbit/s", "unlimited")
_METHODS = {  # as the table names them: label, and where it stands
    "aqsgd fw3/bw6": ("ThinPipe, AQ-SGD: 3 bits forward, 6 backward", (-0.03, 3370)),
    "bf16": ("ThinPipe, bf16", (1.07, 2480)),
    "torch 1F1B bf16": ("torch.distributed.pipelining, bf16", (0.2, 600)),
}


def main() -> None:
    """Write the images."""
    fp32 = Message(HEADER_NBYTES + 4 * _VALUES)
    slow = Network.uniform(4, 300e6, 0.01)
    plain = Workload(
        replicas=1,
        schedule="1F1B",
        microbatches=8,
        forward_s=(0.072,) * 4,
        backward_s=(0.144,) * 4,
        activations=(fp32,) * 3,
        gradients=(fp32,) * 3,
    )
    fw3 = Message(HEADER_NBYTES + 3 * _VALUES // 8 + 2 * 1024)
    bw6 = Message(HEADER_NBYTES + 6 * _VALUES // 8 + 2 * 1024)
    thin = replace(plain, activations=(fw3,) * 3, gradients=(bw6,) * 3)
    models: Mapping[str, tuple[Workload, Network | None]] = {
        "fast_link": (plain, None),
        "slow_link": (plain, slow),
        "thin_messages": (thin, slow),
        "deep": (replace(thin, schedule="Deep1F1B"), slow),
    }
    for name, (work, network) in models.items():
        step = simulate(work, network)
        svg = timeline_svg(step.events).replace("<svg ", f'<svg xmlns="{_SVG}" ', 1)
        (_IMAGES / f"{name}.svg").write_text(svg + "\n", encoding="utf-8")
        print(f"{name}: {step.step_s:.2f} s")
    _draw_speed(_IMAGES / "speed.png")


def _draw_speed(file: Path) -> None:
    """Tokens per second by rate of the links, one line per method."""
    page = _RESULTS.read_text(encoding="utf-8")
    (table,) = re.findall(r"^## 8 microbatches$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    speeds = {
        (row[0], row[1]): float(row[4].replace(",", ""))
        for row in rows
        if row and row[0] in _METHODS
    }
    figure = Figure(figsize=(9.0, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title("Tokens per second, by the rate of every link", loc="left", fontweight="bold")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.grid(axis="y", color="#e3e6ea")
    for (method, (label, place)), color in zip(_METHODS.items(), _COLORS, strict=True):
        y = [speeds[method, rate] for rate in _RATES]
        axes.plot(_RATES, y, "o-", color=color, linewidth=2.2)
        axes.text(*place, label, color=color, fontsize=10, fontweight="bold")
    axes.set_ylim(0, 3700)
    figure.savefig(file)


if __name__ == "__main__":
    main()
