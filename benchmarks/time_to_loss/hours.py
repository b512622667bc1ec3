"""Hours of a run on a link: the sum over its steps of the seconds measured for such a step."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness import format_table
from benchmarks.time_to_loss.seconds import TORCH
from benchmarks.time_to_loss.tasks import BASELINE, LAYOUTS, LayoutName
from thinpipe.launch.host.links import format_rate

_Runs = dict[int, Mapping[str, Any]]
"""By seed."""
GOAL = 0.01
"""A run has arrived if it ends so few nats above the uncompressed one, held out."""


@dataclass(frozen=True)
class Hours:
    """A method over a link; `link` is bit/s of every up- and downlink, None for no limit.

    `hours_uncompressed_free` is of fp32 without a limit or delay, if that was timed. `steps` and
    `bytes` are those of the run, of all ranks; `final_gap` is its held-out loss above fp32's at the
    end, each at the best of the learning rates that were tried, the median over seeds; `worst_gap`
    is of the worst seed.
    """

    task: str
    layout: LayoutName
    method: str
    gpu: str
    link: float | None
    delay_ms: float
    replicas: int
    stages: int
    shards: int
    hours: float
    hours_uncompressed_free: float | None
    steps: int
    bytes: int
    final_gap: float
    worst_gap: float

    @property
    def arrives(self) -> bool:
        return self.final_gap <= GOAL


def compose(
    losses: Sequence[Mapping[str, Any]], seconds: Iterable[Mapping[str, Any]]
) -> list[Hours]:
    """Rows of all that was trained and timed; losses are those of one number of steps per task."""
    known = gaps(losses)
    found, free = [], dict[tuple[str, ...], float]()
    for timed in sorted(seconds, key=_unthrottled_first):
        trained = TORCH.get(timed["layout"], {}).get(timed["method"], timed["method"])
        key = (timed["task"], timed["layout"], trained)
        if key not in known:
            continue
        run, each_s = known[key][0], (timed["first_s"], timed["later_s"])
        first = run["steps"] // run["epochs"]
        hours = (first * each_s[0] + (run["steps"] - first) * each_s[1]) / 3600
        place = (timed["task"], timed["layout"], timed["gpu"])
        if timed["method"] == BASELINE and timed["rate_bps"] is None and not timed["delay_ms"]:
            free[place] = hours
        layout = LAYOUTS[timed["layout"]]
        found.append(
            Hours(
                **{name: timed[name] for name in ("task", "layout", "method", "gpu", "delay_ms")},
                link=timed["rate_bps"],
                replicas=layout.replicas,
                stages=layout.stages,
                shards=layout.shards,
                hours=hours,
                hours_uncompressed_free=free.get(place),
                steps=run["steps"],
                bytes=sum(sum(run[kind]) for kind in ("cut_bytes", "sync_bytes", "shard_bytes")),
                final_gap=known[key][1],
                worst_gap=known[key][2],
            )
        )
    return found


def _unthrottled_first(timed: Mapping[str, Any]) -> tuple[bool, float, bool]:
    return (timed["rate_bps"] is not None, timed["delay_ms"], timed["method"] != BASELINE)


def gaps(
    losses: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, ...], tuple[Mapping[str, Any], float, float]]:
    """By task, layout and method: a run at its best rate, its median gap and its worst.

    The baseline's rate is the best of those that both were trained at, or of its own.
    """
    groups: dict[tuple[str, ...], dict[float, _Runs]] = {}
    for row in losses:
        by_rate = groups.setdefault((row["task"], row["layout"], row["method"]), {})
        by_rate.setdefault(row["lr"], {})[row["seed"]] = row
    found: dict[tuple[str, ...], tuple[Mapping[str, Any], float, float]] = {}
    for (task, layout, method), by_rate in groups.items():
        one = groups.get((task, "one", BASELINE), {})  # sums alike, in another order
        plain = groups.get((task, layout, BASELINE), one)
        both = {lr: runs for lr, runs in plain.items() if lr in by_rate} or plain
        runs, base = _best(by_rate), _best(both)
        above = [row["final"] - base[seed]["final"] for seed, row in runs.items() if seed in base]
        if above:
            found[task, layout, method] = next(iter(runs.values())), median(above), max(above)
    return found


def _best(by_rate: Mapping[float, _Runs]) -> _Runs:
    if not by_rate:
        return {}
    seeds = set.intersection(*map(set, by_rate.values()))
    return min(by_rate.values(), key=partial(_typical, seeds=seeds))


def _typical(runs: _Runs, seeds: Collection[int]) -> float:
    """A rate is judged by seeds that all rates were tried with."""
    return float(median(row["final"] for seed, row in runs.items() if seed in seeds or not seeds))


def table(rows: Sequence[Hours], task: str, layout: LayoutName, gpu: str) -> str:
    """Hours by link, a line per method, the quickest of those that arrive in bold."""
    chosen = [row for row in rows if (row.task, row.layout, row.gpu) == (task, layout, gpu)]
    links = list(dict.fromkeys((row.link, row.delay_ms) for row in chosen))
    best = {
        link: min(
            (r.hours for r in chosen if (r.link, r.delay_ms) == link and r.arrives), default=0
        )
        for link in links
    }
    heads = ["method", "gap", "worst", "GB", *(_link(*link) for link in links)]
    lines = []
    for method in dict.fromkeys(row.method for row in chosen):
        own = {(row.link, row.delay_ms): row for row in chosen if row.method == method}
        one = next(iter(own.values()))
        cells = [_cell(own.get(link), best[link]) for link in links]
        gaps = (f"{one.final_gap:+.4f}", f"{one.worst_gap:+.4f}")
        lines.append([method, *gaps, f"{one.bytes / 1e9:.3g}", *cells])
    return format_table(heads, lines)


def _link(rate_bps: float | None, delay_ms: float) -> str:
    return format_rate(rate_bps) + (f", {delay_ms:g} ms" if delay_ms else "")


def _cell(row: Hours | None, best: float) -> str:
    if row is None:
        return "-"
    hours = f"{row.hours:.3g}"
    return f"**{hours}**" if row.arrives and row.hours <= best else hours
