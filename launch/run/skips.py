"""Steps that are skipped: the first one warns, many in a row end the run.

A step is skipped if its loss or gradients are not finite, or if none of its targets counts.
"""

import logging

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError

_log = logging.getLogger(__name__)
_NOT_FINITE = "its loss or gradients are not finite"
_EMPTY = "none of their targets counts in the loss (all are masked)"


class SkippedError(ConfigError):
    """The run does not learn any more; the message says what to change."""


class Skips:
    """Counts skipped steps, alike on all ranks."""

    def __init__(self, config: RunConfig, *, speaks: bool) -> None:
        """The rank that `speaks` warns."""
        self._config, self._speaks = config, speaks
        self._row = self._empty = self._steps = 0
        self._warned: set[str] = set()

    def count(self, step: int, *, skipped: bool, empty: bool = False) -> None:
        """Step number `step` (from 1) was skipped, or not; `empty`: as none of its targets counts.

        Raises:
            SkippedError: too many in a row were.
        """
        self._steps += 1
        self._row = self._row + 1 if skipped else 0
        self._empty = self._empty + 1 if empty else 0
        why = _EMPTY if empty else _NOT_FINITE
        if skipped and why not in self._warned and self._speaks:
            self._warned.add(why)
            _log.warning("warning: step %d was skipped: %s; weights stay as they were", step, why)
        if self._row >= self._config.train.max_skipped:
            self._give_up(step)

    @property
    def state(self) -> list[int]:
        return [self._row, self._empty, self._steps]

    @state.setter
    def state(self, counts: list[int]) -> None:
        self._row, self._empty, self._steps = counts

    def finish(self, step: int) -> None:
        """The run ends after `step`.

        Raises:
            SkippedError: it has learned nothing since its first step.
        """
        if self._row > 1 and self._row >= self._steps - 1:
            self._give_up(step)

    def _give_up(self, step: int) -> None:
        if self._empty >= self._row:
            raise SkippedError(
                f"steps {step - self._row + 1} to {step} were skipped: {_EMPTY}; look at the "
                "targets: -100 masks one (train.max_skipped says how many in a row are too many)"
            )
        is_bf16 = self._config.pipeline.precision == "bf16"
        bf16 = ', pipeline.precision = "fp32"' if is_bf16 else ""
        raise SkippedError(
            f"steps {step - self._row + 1} to {step} were skipped: their losses or gradients are "
            f"not finite; use a lower train.lr than {self._config.train.lr:g}, more "
            f"train.warmup_steps, a train.clip_norm{bf16}, or more bits at the cuts, from an older "
            "checkpoint: --resume --step N (train.max_skipped says how many in a row are too many)"
        )
