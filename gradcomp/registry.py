"""Finds methods by name: `gradcomp/methods/<name>.py` is the method `<name>`; there is no list."""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from pydantic import AliasChoices, BaseModel
from torch import nn

from thinpipe.gradcomp import methods
from thinpipe.gradcomp.options import TrainOptions

if TYPE_CHECKING:
    from thinpipe.pipeline.comm.transport import Peers
    from thinpipe.pipeline.replica_sync import ReplicaSync


class Method(Protocol):
    """The content of a method's file.

    It may also hold `optimizer(config, parameters, train, sync)`, which returns an optimizer;
    `sync` is what `build` returned. `GOES_ON`, if there is one, names the options with which
    replicas go on when one is lost; what `build` returns is a `GoesOn` then.
    """

    Config: type[BaseModel]
    REPLICAS_EQUAL: bool
    """Whether parameters are equal on all replicas after every step."""

    def build(
        self, config: Any, parameters: Sequence[nn.Parameter], peers: "Peers"
    ) -> "ReplicaSync":
        """Make the exchange of one rank; `peers` are the replicas of its stages."""


def goes_on_with(name: str) -> Mapping[str, Any] | None:
    """The options with which a method's replicas go on when one is lost; None: they cannot."""
    return getattr(load_method(name), "GOES_ON", None)


def goes_on(name: str, options: BaseModel) -> bool:
    """Whether replicas with these options go on when one is lost."""
    needed = goes_on_with(name)
    return needed is not None and needed.items() <= options.model_dump().items()


def method_names() -> list[str]:
    """Names of all methods, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(methods.__path__))


def load_method(name: str) -> Method:
    """Import a method.

    Raises:
        ValueError: there is no such method; the message lists those there are.
    """
    if name not in method_names():
        known = ", ".join(method_names())
        raise ValueError(f'gradcomp.method = "{name}": no such method; there are: {known}')
    return cast(Method, importlib.import_module(f"thinpipe.gradcomp.methods.{name}"))


def build_optimizer(
    name: str,
    options: BaseModel,
    parameters: Sequence[nn.Parameter],
    train: TrainOptions,
    sync: "ReplicaSync",
) -> torch.optim.Optimizer | None:
    """The optimizer that a method brings along, or None: most work with any."""
    make: Any = getattr(load_method(name), "optimizer", None)
    own: torch.optim.Optimizer | None = make and make(options, parameters, train, sync)
    return own


def brings_optimizer(name: str) -> bool:
    """Whether a method brings an optimizer along."""
    return hasattr(load_method(name), "optimizer")


def option_aliases(name: str) -> dict[str, str]:
    """Other names of a method's options, and the options."""
    fields = load_method(name).Config.model_fields.items()
    return {
        str(alias): option
        for option, field in fields
        if isinstance(field.validation_alias, AliasChoices)
        for alias in field.validation_alias.choices
        if alias != option
    }


def parse_options(name: str, options: Mapping[str, Any]) -> BaseModel:
    """Check a method's options against its Config."""
    return load_method(name).Config.model_validate(options)
