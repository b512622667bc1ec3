"""Where to cut a chain of blocks: the exact minimum of the slowest stage or link.

A pipeline in steady state is as slow as its slowest part, so the bottleneck over all stages and
links is minimised: a stage's compute (on its own device, plus codecs that share its cores) and a
link's transfer. Of the many cuts that reach that minimum, one with the least total is taken: it
fills the pipeline fastest. Both are dynamic programs over (stage, last block),
O(stages x blocks^2).

torchgpipe.balance solves a related problem by a heuristic ("Block Partitions of Sequences",
Barany and Grinberg 2013): it ignores links, devices and memory, and cuts 30 equal blocks for 8
stages into seven times 3 and one 9.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Problem:
    """The costs of stages and cuts; rows are stages, in the order of the pipeline.

    `compute_s[s][k]` is block k on the device of stage s, `fixed_s[s]` what the stage computes
    in any case. `cut_s[s][k]` is the transfer time of the link after stage s if stage s + 1 begins
    with block k (entry 0 is not used). `memory[s][k]` bytes count against `memory_limit[s]`, as do
    `fixed_memory[s]`, which the stage takes in any case. There is a block for every stage.
    """

    compute_s: Sequence[Sequence[float]]
    cut_s: Sequence[Sequence[float]]
    fixed_s: Sequence[float]
    memory: Sequence[Sequence[float]]
    memory_limit: Sequence[float]
    fixed_memory: Sequence[float] = ()

    @property
    def stages(self) -> int:
        return len(self.compute_s)

    @property
    def blocks(self) -> int:
        return len(self.compute_s[0])


def best_cuts(problem: Problem) -> tuple[int, ...]:
    """The cuts with the least bottleneck: first blocks of all stages but the first.

    Raises:
        ValueError: no cuts fit the memory.
    """
    least_s, _ = _search(problem, max, ceiling_s=math.inf)
    if least_s == math.inf:
        need = min(sum(row) for row in problem.memory) + sum(problem.fixed_memory)
        limits = ", ".join(f"{limit / 1e9:.3g}" for limit in problem.memory_limit)
        raise ValueError(
            f"the {problem.blocks} blocks need {need / 1e9:.3g} GB in total, which do not fit "
            f"{problem.stages} stages with {limits} GB in this order; use more stages, fewer "
            "microbatches in flight or smaller batches"
        )
    _, cuts = _search(problem, lambda a, b: a + b, ceiling_s=least_s)
    return cuts


class _Loads:
    """Seconds of one stage by its range of blocks; infinite if they do not fit its memory."""

    def __init__(self, problem: Problem, stage: int) -> None:
        self._compute_s = [0.0, *accumulate(problem.compute_s[stage])]
        self._memory = [0.0, *accumulate(problem.memory[stage])]
        self._limit, self._fixed_s = problem.memory_limit[stage], problem.fixed_s[stage]
        if problem.fixed_memory:
            self._limit -= problem.fixed_memory[stage]

    def __call__(self, first: int, stop: int) -> float:
        if self._memory[stop] - self._memory[first] > self._limit:
            return math.inf
        return self._compute_s[stop] - self._compute_s[first] + self._fixed_s


def _search(
    problem: Problem, combine: Callable[[float, float], float], *, ceiling_s: float
) -> tuple[float, tuple[int, ...]]:
    """The least combined time of all stages and links, none of which may exceed the ceiling."""

    def allowed(seconds: float) -> float:
        return seconds if seconds <= ceiling_s else math.inf

    load, stops = _Loads(problem, 0), range(1, problem.blocks + 1)
    plans: dict[int, tuple[float, tuple[int, ...]]]
    plans = {stop: (allowed(load(0, stop)), ()) for stop in stops}
    for stage in range(1, problem.stages):
        load, cut_s = _Loads(problem, stage), problem.cut_s[stage - 1]
        plans = {
            stop: min(
                (combine(until_s, allowed(load(first, stop))), (*plans[first][1], first))
                for first in range(stage, stop)
                for until_s in [combine(plans[first][0], allowed(cut_s[first]))]
            )
            for stop in range(stage + 1, problem.blocks + 1)
        }
    return plans[problem.blocks]
