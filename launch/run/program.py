"""What Python programs import as `thinpipe`: the run of a pipeline (`pipeline.py`).

The program runs on every rank. `thinpipe run` starts the ranks; torchrun does too.
"""

import atexit
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from thinpipe.launch.build import ProgramParts
from thinpipe.launch.checkpoint.resume import Resume, after_restart
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.own import Collate, Dataset, Reading, own_set
from thinpipe.launch.data.streams.stream import StreamSet, own_stream
from thinpipe.launch.host.terminal import end_now
from thinpipe.launch.net.ranks.session import SHOW
from thinpipe.launch.optimizer import rebind
from thinpipe.launch.run.ending import end_failed
from thinpipe.launch.run.pipeline import Pipeline, config_of
from thinpipe.launch.run.run import RankRun
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.models.own.functions import LOOKING, NotRun, name_of

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Run(RankRun):
    """Training of a pipeline in a folder, as one of its ranks; all ranks run the same program.

        run = Run("runs/mine", pipe, torch.optim.AdamW(pipe.parameters(), 1e-3))
        for epoch in run.epochs(3):
            for batch in run.batches(samples, size=32):
                step = run.step(batch)
            run.evaluate(held_out)
        run.save_model("mine.safetensors")

    It is closed when the program ends, or by `with Run(...) as run`.
    """

    def __init__(  # noqa: PLR0913  # one parameter per setting
        self,
        folder: str | Path,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        *,
        resume: Literal["if-there", "required", "never"] | int = "if-there",
        schedule: Callable[[int], float] | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] = (),
        metrics: Sequence[object] = (),
        best: str | None = None,
        patience: int | None = None,
        seed: int = 0,
        accumulate: int = 1,
        clip_norm: float = 0.0,
        writers: Sequence[str] = (),
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Nothing is waited for before the first epoch begins.

        `optimizer` was made with `pipeline.parameters()`, or is a function of this rank's named
        parameters, or AdamW by `settings["train"]`. Its learning rates are multiplied by
        `schedule(step)`, step from 0; or they are those of a torch `scheduler`, which the program
        steps and the run saves. `metrics` are names, functions or objects that evaluations measure
        by, `best` is the one whose best checkpoint is kept, and `patience` how many evaluations in
        a row may be no better (`Best`). `accumulate` is in how many parts a step's samples go
        through the pipeline. `resume`: from the newest checkpoint if there is one, always
        (an error if there is none), or never; a number is the step of the checkpoint. `clip_norm`
        limits the gradient norm, 0 does not. `writers` get the numbers of every step too:
        "tensorboard", "wandb", "trackio". `settings` are other sections of a run file, by name:
        checkpoint, memory, network.

        Raises:
            ConfigError: a setting is wrong.
        """
        if not isinstance(pipeline, Pipeline):
            raise ConfigError(
                f"Run: pipeline is a {type(pipeline).__name__}; give it a thinpipe.Pipeline(model, "
                "loss, ...) of that model"
            )
        train = {"warmup_steps": 0, "decay": "none", "clip_norm": clip_norm}
        train["accumulate"] = accumulate
        chosen = _sections(settings or {}, writers, _evaluated(metrics, best, patience))
        config = _config(folder, pipeline, seed, train | _described(optimizer), chosen)
        _found(config)
        self._reading = Reading()
        self._hook = sys.excepthook  # the program's, before torch puts its own around it
        schedulers = [scheduler] if isinstance(scheduler, LRScheduler) else scheduler
        own = [one for one in metrics if not isinstance(one, str)]
        factory = _factory(optimizer, pipeline)
        given = ProgramParts(factory, schedule, tuple(schedulers), own, is_program=True)
        super().__init__(config, _resume(resume), show=int(os.environ.get(SHOW, "0")), given=given)
        running = _RUNNING.get()
        if running is not None:
            running.append(self)
        else:
            _end_with_interpreter(self)

    def batches(
        self,
        samples: Dataset | DataLoader[Any],
        size: int | None = None,
        *,
        collate: Collate | None = None,
        longest: int | None = None,
        shuffle: bool = True,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """This replica's batches of what is left of the epoch; give each to `step`.

        `samples` is a map-style dataset whose items are (input, target) or dicts with labels, or a
        DataLoader of one; a sample's index is its id. Or it is a stream, an object with __iter__
        alone, such as an IterableDataset: then `steps` is how many at most. `size` is the samples
        of a step over all replicas. `collate`, `longest` and `shuffle` are as in `Reading`.

        Raises:
            ValueError: the samples do not fit the model, or changed since the last epoch.
        """
        name, reading = name_of(type(samples)), Reading(collate, longest, shuffle)
        self.config = self.config.updated(data={"factory": name})
        self._reading = reading
        if not hasattr(samples, "__len__") and hasattr(samples, "__iter__"):
            return self.batches_of(self._stream(samples, name, size, steps), size or 1)
        if steps is not None:
            raise ValueError(f"run.batches: steps = {steps}: {name} has a length, which says it")
        found, size = own_set(samples, name, size=size, reading=reading)
        self._reading = found.reading
        return self.batches_of(found, size)

    def _stream(self, samples: Any, name: str, size: int | None, steps: int | None) -> StreamSet:
        """Samples from the beginning of an iterable; a resume goes on where they were."""
        if size is None or steps is None:
            raise ValueError(
                f"run.batches: {name} has no length; give the samples of a step and the most steps,"
                " as in size=32, steps=1000"
            )
        return own_stream(samples, name, size, steps, self._reading)

    def evaluate(
        self, samples: Dataset | DataLoader[Any], *, collate: Collate | None = None
    ) -> dict[str, float]:
        """Metrics on a dataset: `loss`, and with cuts `loss_compressed`; alike on all ranks.

        Without `collate` it is that of the training samples.
        """
        name = name_of(type(samples))
        reading = Reading(collate or self._reading.collate)
        size = getattr(samples, "batch_size", None) or 1  # of a DataLoader; sums need none
        return self.evaluate_on(own_set(samples, name, size=size, reading=reading)[0])


class RunRequested(NotRun):
    """Raised where a run would begin, with what the program wants it to be."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__("only looked at")
        self.config = config


_RUNNING: ContextVar[list[Run] | None] = ContextVar("running", default=None)
"""The runs that whoever runs the program will close."""


def run_program(program: Callable[[], None]) -> NoReturn:
    """Run a program as a rank, close its runs, and end the process."""
    runs: list[Run] = []
    _RUNNING.set(runs)
    try:
        program()
        for run in reversed(runs):
            run.__exit__(None, None, None)
    except BaseException as error:
        _end_failed(runs, error)
    end_now(0)


def _config(
    folder: str | Path,
    pipeline: Pipeline,
    seed: int,
    train: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
) -> RunConfig:
    name = Path(folder).name
    named = {"name": name} if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) else {}
    sections = {
        **pipeline.sections,
        "run": {"folder": str(folder), "seed": seed, **named},
        **settings,
        "train": {**pipeline.sections["train"], **train, **settings.get("train", {})},
    }
    return config_of(sections, "Run")


def _sections(
    settings: Mapping[str, Mapping[str, Any]], writers: Sequence[str], evaluation: dict[str, Any]
) -> Mapping[str, Mapping[str, Any]]:
    """Settings by section, which win over what a run's own arguments say."""
    report = {"report": {"writers": list(writers)}} if writers else {}
    return {**report, **settings, "eval": {**evaluation, **settings.get("eval", {})}}


def _evaluated(metrics: Sequence[object], best: str | None, patience: int | None) -> dict[str, Any]:
    """The section [eval] of these; functions and objects have no names in it."""
    named = [one for one in metrics if isinstance(one, str)]
    given = {"metrics": named if metrics else None, "best": best, "patience": patience}
    return {name: value for name, value in given.items() if value is not None}


def _found(config: RunConfig) -> None:
    if LOOKING.get():
        raise RunRequested(config)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        program = getattr(sys.modules["__main__"], "__file__", None)
        start = f"start it with `thinpipe run {Path(program or '').name}`, or under torchrun"
        if program is None:
            start = (
                "write the program to a file (in a notebook: begin the cell with %%writefile "
                "mine.py), and start that with `thinpipe run mine.py` (in a notebook: !thinpipe "
                'run mine.py); thinpipe.load("runs/...") gives its model here'
            )
        count = config.world_size
        raise ConfigError(f"this run needs {count} process{'es' * (count > 1)}; {start}")


def _described(optimizer: Any) -> dict[str, Any]:
    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ConfigError(
                f"optimizer = {optimizer!r}: give an optimizer, as in "
                "torch.optim.AdamW(pipe.parameters(), 1e-3)"
            )
        return {"optimizer": name_of(optimizer)}
    rate = optimizer.defaults.get("lr")
    return {
        "optimizer": name_of(type(optimizer)),
        **({"lr": float(rate)} if rate is not None and float(rate) > 0 else {}),
    }


def _factory(optimizer: Any, pipeline: Pipeline) -> Any:
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        names = {parameter: name for name, parameter in pipeline.named_parameters()}
        return lambda real: rebind(optimizer, names, real)
    return lambda real: optimizer(list(real.items()))


def _resume(resume: str | int) -> Resume:
    if isinstance(resume, int) and not isinstance(resume, bool):
        return Resume(True, resume)
    known = {
        "if-there": Resume(True, required=False),
        "required": Resume(True),
        "never": after_restart(Resume(False)),
    }
    if resume not in known:
        raise ConfigError(f'resume = {resume!r}: use "if-there", "required", "never" or a step')
    return known[str(resume)]


def _end_with_interpreter(run: Run) -> None:
    """Close the run when the program ends by itself, or by an error that nothing caught."""
    atexit.register(run.__exit__, None, None, None)

    sys.excepthook = lambda _kind, error, _trace: _end_failed([run], error)


def _end_failed(runs: Sequence[Run], error: BaseException) -> NoReturn:
    """Close the runs, whose peers may know what failed first, and end the process."""
    hook = runs[-1]._hook if runs else sys.excepthook  # the program's own hears of it
    if hook is not sys.__excepthook__ and isinstance(error, Exception):
        with suppress(Exception):
            hook(type(error), error, error.__traceback__)
    try:
        for run in reversed(runs):
            run.__exit__(type(error), error, error.__traceback__)
    except BaseException as first:
        error = first
    config = runs[-1].config if runs else None
    end_failed(error, config, resume='tp.Run(..., resume="if-there")')
