"""How far each method of exchange ended above all-reduce (`losses.json`), to rank them by."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from thinpipe.launch.config.run import RunConfig

GOAL = 0.01
"""Nats above all-reduce that a method may end."""


@dataclass(frozen=True)
class Measured:
    """A method with options: how far it ended above all-reduce, held out, if that was tried.

    `fine_tuning` is of 4 replicas of a pretrained model, `from_scratch` of one with random weights.
    """

    method: str
    options: Mapping[str, Any]
    fine_tuning: float | None = None
    from_scratch: float | None = None

    def loss(self, config: RunConfig) -> float | None:
        """That of runs like this one."""
        return self.fine_tuning if config.pretrained else self.from_scratch

    @property
    def label(self) -> str:
        given = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([self.method, *given[:2], *(["..."] if given[2:] else [])])


def measured() -> list[Measured]:
    """All that was tried, in the order of the file."""
    text = (resources.files(__package__) / "losses.json").read_text(encoding="utf-8")
    return [Measured(**one) for one in json.loads(text)]
