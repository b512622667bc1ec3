"""What a run's evaluations measure."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.engine import PipelineEngine
from thinpipe.pipeline.loss import Objective, mean_loss
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.metrics import NAMES, PERPLEXITY, Mean, Measures, Metric, named_metrics
from thinpipe.pipeline.models.own.functions import load_function, name_of

_LARGEST_LOSS = 700.0  # exp() of more is not a float


class Wanted:
    """The metrics of a run: names, and objects or functions of a program."""

    def __init__(
        self,
        names: Sequence[str] | None,
        objective: Objective,
        given: Sequence[object] = (),
        program: Sequence[str] = (),
    ) -> None:
        """`names` are of `NAMES`, or "module:function"; None means those of the objective.

        Raises:
            ValueError: a function cannot be imported, or two metrics have one name.
        """
        chosen = objective.metrics if names is None else tuple(names)
        named = [name for name in chosen if name in NAMES]
        loaded = [
            load_function(name, "eval.metrics", program) for name in chosen if name not in NAMES
        ]
        self._perplexity = PERPLEXITY in named
        self._metrics = named_metrics(named)
        for one in (*loaded, *given):
            name, metric = _metric(one)
            if name in self._metrics or name in ("loss", PERPLEXITY):
                raise ConfigError(f"eval.metrics: two metrics are called {name}; rename one")
            self._metrics[name] = metric

    def evaluate(
        self, engine: PipelineEngine, batches: Iterable[Batch], step: int, *, compressed: bool
    ) -> dict[str, float]:
        """By name, `loss` first; the same on all ranks, which give equally many batches."""
        measures = Measures(self._metrics)
        heads = [
            engine.eval_step(batch, step, compressed=compressed, measures=measures)
            for batch in batches
        ]
        loss, count = (sum(column) for column in zip(*heads, strict=True))
        mean = mean_loss(loss, count)
        found = {"loss": mean, **measures.values(engine.transport.gather(measures.packed()))}
        if not count:  # F1 of nothing would be 0
            found = dict.fromkeys(found, math.nan)
        if self._perplexity:
            found[PERPLEXITY] = math.exp(mean) if mean < _LARGEST_LOSS else mean * math.inf
        return found


def batches_of(samples: SampleSet, config: RunConfig, mesh: Mesh) -> Iterator[Batch]:
    """This DP rank's share of the held-out samples; all DP ranks get equally many batches.

    Those of shards are of one size, as shards run alike; a last sample may not count.
    """
    size = config.train.batch_size
    for first in range(0, len(samples), size):
        ids = torch.arange(first, min(first + size, len(samples)))
        shares = ids.tensor_split(mesh.dp_size)
        own = shares[mesh.dp_rank]
        missing = len(shares[0]) - len(own) if mesh.shards > 1 else 0
        batch = config.model.adapted(samples.batch(torch.cat([own, ids[:missing]])))
        yield batch.counting(len(own)) if missing else batch


def _metric(given: object) -> tuple[str, Metric]:
    if hasattr(given, "tally") and hasattr(given, "value"):
        return getattr(given, "name", type(given).__name__), given
    if not callable(given):
        raise ConfigError(
            f"eval.metrics: {given!r} is no metric; give a name of {', '.join(NAMES)}, a function "
            "of (outputs, targets), or an object with tally and value"
        )
    name = name_of(given).rpartition(":")[2].rpartition(".")[2]
    return name, Mean(given, name)
