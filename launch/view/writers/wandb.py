"""Weights & Biases: one run over all resumes; without a login it stays in the run folder's `wandb`.

`WANDB_MODE` and the other variables of wandb work as everywhere.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from thinpipe.launch.view.writers.writer import Destination


class WandbWriter:
    """The step is a metric of its own: W&B's counter rejects repeated steps."""

    def __init__(self, place: Destination) -> None:
        wandb: Any = import_module("wandb")  # slow to import
        quiet = wandb.Settings(console="off", silent=True)
        chosen = "WANDB_MODE" in os.environ
        offline = not chosen and not wandb.login(prompt=False)  # else it would ask at a terminal
        self._run = wandb.init(
            project=place.project,
            name=place.name,
            id=place.run_id,
            resume="allow",
            dir=str(place.folder),
            config=dict(place.settings),
            mode="offline" if offline else None,
            settings=quiet,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


open_writer = WandbWriter
