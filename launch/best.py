"""The best evaluation of a run, and whether there were enough without a better one."""

import math
from collections.abc import Mapping
from typing import Any

from thinpipe.launch.config.sections import EvalConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.pipeline.metrics import LOWER_IS_BETTER, NAMES


class Best:
    """Counts evaluations, alike on all ranks; saved with checkpoints.

    `step` is how many optimizer steps were done at the best one, None before the first.
    """

    def __init__(self, options: EvalConfig) -> None:
        """`options.best` is a metric, after "max" or "min" where its name does not say it.

        Raises:
            ConfigError: it does not say whether higher or lower is better.
        """
        self._patience = options.patience
        self.wanted = options.best is not None or options.patience is not None
        words = (options.best or "loss").split()
        self.name = words[-1]
        if len(words) == 1 and self.name not in (*NAMES, "loss"):
            raise ConfigError(
                f'eval.best = "{self.name}": is more of it better, or less? write '
                f'"max {self.name}" or "min {self.name}"'
            )
        lower = words[0] == "min" if len(words) > 1 else self.name in LOWER_IS_BETTER
        self._sign = -1.0 if lower else 1.0
        self.step: int | None = None
        self.value = math.nan
        self._worse = 0

    @property
    def enough(self) -> bool:
        """Whether so many evaluations in a row as `eval.patience` were no better."""
        return self._patience is not None and self._worse >= self._patience

    def judge(self, metrics: Mapping[str, float], step: int) -> bool:
        """Count an evaluation after `step` steps; whether it is the best so far.

        Raises:
            ConfigError: it has no such metric.
        """
        if not self.wanted or step == self.step:
            return False
        if self.name not in metrics:
            raise ConfigError(
                f'eval.best = "{self.name}": evaluations measure {", ".join(metrics)}; name one of '
                "them, or add it to eval.metrics"
            )
        value = metrics[self.name]
        better = math.isfinite(value) and (
            self.step is None or self._sign * value > self._sign * self.value
        )
        self._worse = 0 if better else self._worse + 1
        if better:
            self.step, self.value = step, value
        return better

    def words(self) -> str:
        if self.step is None:
            return "no evaluation was counted"
        return f"the best {self.name} is {self.value:.4g}, after step {self.step}"

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "value": self.value, "worse": self._worse, "name": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting, unless it was another metric that was counted."""
        if state.get("name") == self.name:
            self.step, self.value, self._worse = state["step"], state["value"], state["worse"]
