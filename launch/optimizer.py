"""The optimizer of a rank's parameters: AdamW, also for small numbers, Muon, or a user's own."""

import importlib.util
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from thinpipe.gradcomp.registry import brings_optimizer
from thinpipe.launch.config.sections import TrainConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.packages import EXTRAS
from thinpipe.pipeline.models.own.functions import load_function

Named = Mapping[str, nn.Parameter]
OptimizerFactory = Callable[[Named], torch.optim.Optimizer]

_OUTSIDE = ("embed", "head", "wte", "wpe", "classifier", "score")
"""In names of embeddings and heads: their rows are looked up one by one, as Muon's are not."""

_ONE_OF_THEM = (
    "one of them must set the rates: put it into Run(schedule=function of the step) alone, or give "
    "the scheduler to Run(scheduler=...) without schedule, train.warmup_steps and train.decay"
)


class AdamW(torch.optim.AdamW):
    """Torch's. There each of these methods imports its compiler first, which takes a second."""

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def make_optimizer(
    train: TrainConfig, parameters: Named, *, in_bf16: bool, own: OptimizerFactory | None = None
) -> torch.optim.Optimizer:
    """The optimizer that the settings ask for; `own` makes it instead if given.

    Raises:
        ValueError: the function in `train.optimizer` cannot be used.
    """
    if own is not None:
        return own(parameters)
    if ":" in train.optimizer:
        return _own(train.optimizer, parameters, train.lr)
    return our_optimizer(train, parameters, in_bf16=in_bf16)


def our_optimizer(train: TrainConfig, parameters: Named, *, in_bf16: bool) -> torch.optim.Optimizer:
    """The one that `train.optimizer` names; AdamW if that is a function of the user's."""
    if train.optimizer == "adamw8bit":
        return _adamw_8bit(parameters, train)
    if train.optimizer == "muon":
        return muon_and_adamw(parameters, **_of_adamw(train))
    if in_bf16:
        return _compensated_adamw(parameters, train)
    return AdamW(parameters.values(), **_of_adamw(train))


def check_optimizer(train: TrainConfig, method: str, *, in_bf16: bool) -> None:
    """Check that there is such an optimizer, without making it.

    Raises:
        ValueError: there is none, it cannot be called, or the exchange brings its own along.
    """
    name = train.optimizer
    if name == "adamw":
        if in_bf16:
            _check_package("optimi", 'model.weights = "bf16"', "leave it out")
        return
    check_single(name, method)
    if name == "adamw8bit":
        _check_package("bitsandbytes", 'train.optimizer = "adamw8bit"', 'use "adamw"')
    if name in ("adamw8bit", "muon"):
        return
    if ":" not in name:
        raise ValueError(
            f'train.optimizer = "{name}": no such optimizer; use "adamw", "adamw8bit", "muon" '
            'or "module:function" of your own'
        )
    make = load_function(name, "train.optimizer")
    try:
        inspect.signature(make).bind([], lr=train.lr)
    except TypeError as error:
        raise ValueError(
            f'train.optimizer = "{name}": cannot be called as {name.partition(":")[2]}'
            f"(named_parameters, lr={train.lr}): {error}; change its parameters"
        ) from None
    except ValueError:  # written in C: nobody knows
        return


def _adamw_8bit(parameters: Named, train: TrainConfig) -> torch.optim.Optimizer:
    """Moments in 8 bits with a scale per 256 (Dettmers et al. 2022, arXiv 2110.02861), those of
    fewer than 4096 values in fp32.
    """
    from thinpipe.pipeline.models.hf.quantized import bitsandbytes

    found: torch.optim.Optimizer = bitsandbytes().optim.AdamW8bit(
        list(parameters.values()), train.lr, train.betas, weight_decay=train.weight_decay
    )
    return found


def _compensated_adamw(parameters: Named, train: TrainConfig) -> torch.optim.Optimizer:
    """AdamW that keeps what rounding to bf16 took from a weight, and adds it to the next step
    (Kahan's sum; Zamirai et al. 2020, arXiv 2010.06192). Moments of such weights are in bf16 too.
    """
    from optimi import AdamW

    narrow = [p for p in parameters.values() if p.dtype == torch.bfloat16]
    wide = [p for p in parameters.values() if p.dtype != torch.bfloat16]
    options = _of_adamw(train)
    kernel = {"foreach": False, "triton": False}  # else chosen once, and kept on another device
    return _Parts(
        [AdamW(narrow, **options, **kernel, eps=1e-8, kahan_sum=True)] if narrow else [],
        [torch.optim.AdamW(wide, **options)] if wide else [],
    )


def muon_and_adamw(
    parameters: Named, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) for matrices of hidden layers, AdamW for all else, at one rate.

    Muon's steps are scaled to AdamW's size (Liu et al. 2025, section 2.2).
    """
    hidden = [p for name, p in parameters.items() if _is_hidden_matrix(name, p)]
    rest = [p for name, p in parameters.items() if not _is_hidden_matrix(name, p)]
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    return _Parts(
        [torch.optim.Muon(hidden, **options, adjust_lr_fn="match_rms_adamw")] if hidden else [],
        [AdamW(rest, betas=betas, **options)] if rest else [],
    )


def _of_adamw(train: TrainConfig) -> dict[str, Any]:
    return {"lr": train.lr, "betas": train.betas, "weight_decay": train.weight_decay}


def _check_package(name: str, what: str, else_: str) -> None:
    if importlib.util.find_spec(name) is None:
        extra = f"thinpipe[{EXTRAS[name]}]"
        raise ValueError(f'{what}: needs {name}: pip install "{extra}"; or {else_}')


def check_single(name: str, method: str) -> None:
    """Check that not both the settings and the exchange between replicas bring an optimizer.

    Raises:
        ValueError: both do.
    """
    if name != "adamw" and brings_optimizer(method):
        raise ValueError(
            f'train.optimizer = "{name}": gradcomp.method = "{method}" brings its own optimizer '
            "along; remove train.optimizer, or choose another method"
        )


def _own(name: str, parameters: Named, lr: float) -> torch.optim.Optimizer:
    make = load_function(name, "train.optimizer")
    try:
        found = make(list(parameters.items()), lr=lr)
    except Exception as error:
        raise ValueError(
            f'train.optimizer = "{name}": called as {name.partition(":")[2]}(named_parameters, '
            f"lr={lr}) fails: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, torch.optim.Optimizer):
        raise ValueError(
            f'train.optimizer = "{name}": returned {type(found).__name__}, not an Optimizer'
        )
    return found


class Rates:
    """Learning rates of an optimizer: in each step its own times a factor.

    Without a factor they are the program's, which may change them or have torch schedulers do so;
    the program steps those, and their state is saved here.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float] | None,
        schedulers: Sequence[LRScheduler] = (),
    ) -> None:
        """Set those of step 0.

        Raises:
            ConfigError: a factor, and a torch scheduler too; or one that is not among `schedulers`.
        """
        self._optimizer, self._factor, self._step = optimizer, factor, 0
        self._schedulers = tuple(schedulers)
        self._bases = [group["lr"] for group in self._groups]
        if factor is not None and (schedulers or self._has_scheduler):
            raise ConfigError(f"the optimizer has a torch LR scheduler; {_ONE_OF_THEM}")
        for scheduler in self._schedulers:
            if getattr(scheduler, "optimizer", None) is not optimizer:
                raise ConfigError(
                    f"Run: scheduler is a {type(scheduler).__name__} of another optimizer than the "
                    "run's; make it with the optimizer that Run is given"
                )
            _kept_of(scheduler)
        self._check_known()
        self._set()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups  # others once a state was loaded

    @property
    def _has_scheduler(self) -> bool:
        return any("initial_lr" in group for group in self._groups)

    @property
    def last_epoch(self) -> int:
        """The number of the next step; the name is torch's, and that of checkpoints."""
        return self._step

    @last_epoch.setter
    def last_epoch(self, step: int) -> None:
        self._step = step
        self._set()

    def step(self) -> None:
        """Set those of the next step.

        Raises:
            ConfigError: they are no longer what was set, and there is a factor; or a torch
                scheduler has come along that the run does not know.
        """
        found = [group["lr"] for group in self._groups]
        if self._factor is not None and found != self._rates():
            raise ConfigError(
                f"the program set the learning rate of a group to one of {found}, and its schedule "
                f"to one of {self._rates()}; {_ONE_OF_THEM}"
            )
        self._check_known()
        self.last_epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_epoch": self._step,
            "schedulers": [_kept_of(scheduler) for scheduler in self._schedulers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was; the optimizer's groups were restored before.

        Raises:
            ConfigError: the program has other schedulers than it had.
        """
        saved = state.get("schedulers", [])
        if len(saved) != len(self._schedulers):
            raise ConfigError(
                f"Run: {len(self._schedulers)} torch schedulers, but the checkpoint was saved with "
                f"{len(saved)}; give Run the same as before, or start a new run from its weights"
            )
        self.last_epoch = state["last_epoch"]
        for scheduler, kept in zip(self._schedulers, saved, strict=True):
            now = scheduler.state_dict()
            scheduler.load_state_dict(
                {  # a Counter of milestones was saved as a plain dict
                    name: type(now[name])(value) if isinstance(now.get(name), dict) else value
                    for name, value in kept.items()
                }
            )

    def _check_known(self) -> None:
        if self._factor is None and self._has_scheduler and not self._schedulers:
            raise ConfigError(
                "the optimizer has a torch LR scheduler that the run does not know, so that its "
                "state would not be saved; make it before the run, and give it: "
                "tp.Run(..., scheduler=it)"
            )

    def _rates(self) -> list[float]:
        assert self._factor is not None
        return [base * self._factor(self._step) for base in self._bases]

    def _set(self) -> None:
        if self._factor is not None:
            for group, rate in zip(self._groups, self._rates(), strict=True):
                group["lr"] = rate


def _kept_of(scheduler: LRScheduler) -> dict[str, Any]:
    """What a checkpoint keeps of a scheduler."""
    state = scheduler.state_dict()
    try:
        json.dumps(state)
    except TypeError as error:
        raise ConfigError(
            f"Run: scheduler is a {type(scheduler).__name__} whose state cannot be saved "
            f"({error}); use Run(schedule=function of the step)"
        ) from None
    return {name: dict(v) if isinstance(v, dict) else v for name, v in state.items()}


def rebind(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], real: Named
) -> torch.optim.Optimizer:
    """Give an optimizer of the whole model's parameters those of this rank instead.

    `names` are those of the parameters that it was made with, which have no values. Its groups and
    their settings stay.

    Raises:
        ValueError: it has state already, or parameters of something else.
    """
    kind = type(optimizer).__name__
    if optimizer.state:
        raise ValueError(
            f"{kind} makes its state when it is made, but each rank has only its part of the "
            f"model; give Run a function instead, as in lambda parameters: {kind}(parameters)"
        )
    for group in optimizer.param_groups:
        unknown = [parameter for parameter in group["params"] if parameter not in names]
        if unknown:
            raise ValueError(
                f"{kind} has a parameter of shape {list(unknown[0].shape)} that is none of the "
                "pipeline's; make it with pipe.parameters()"
            )
        here = [names[parameter] for parameter in group["params"] if names[parameter] in real]
        group["params"] = [real[name] for name in here]
        if "param_names" in group:
            group["param_names"] = here
    return optimizer


class _Parts(torch.optim.Optimizer):
    def __init__(self, *parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = [optimizer for some in parts for optimizer in some]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """They work on the groups and the state that this object has."""
        groups: Iterable[dict[str, Any]] = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]  # type: ignore[call-overload]
            part.state = self.state


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and not any(word in name for word in _OUTSIDE)


def named_parameters(modules: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Trained parameters of some modules, each once."""
    found: dict[nn.Parameter, str] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                found.setdefault(parameter, name)
    return {name: parameter for parameter, name in found.items()}
