"""The hosts file: the machines of a run, and how ssh reaches them."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, SubprocessError, check_output
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from thinpipe.launch.config.network import NAME, as_name
from thinpipe.launch.config.toml import ConfigError, load_as, top_keys
from thinpipe.launch.host.interfaces import format_endpoint, parse_endpoint

_RENDEZVOUS_PORT = 29500  # torch's own for MASTER_PORT
_OF_RUNS = {"run", "model", "pipeline", "data", "train"}
_ALIAS_S = 10.0  # how long ssh may take to read its configuration, which can run commands


def _matching(pattern: str, remedy: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r}: {remedy}")
        return value

    return AfterValidator(check)


_WORD = (r"[\w.:%][\w.:%-]*", "use letters, digits, and . : _ - inside")
_Word = Annotated[str, _matching(*_WORD)]
_Address = Annotated[
    str,
    _matching(r"(?!.*@).*", "put the user into user ="),
    _matching(r"(?![^:]*:\d+$).*", "put the port into port ="),
    _matching(*_WORD),
]
_Variable = Annotated[str, _matching(r"[A-Za-z_]\w*", "name it with letters, digits and _")]
_FilePath = Annotated[str, _matching(r"[^-\n][^\n]*", "give a path")]


class HostConfig(BaseModel, frozen=True, extra="forbid"):
    """A machine: how ssh reaches it, and where things are on it.

    `checkout` is ThinPipe's folder, relative to the user's home; `python` and the run file are
    relative to it. `interface` is the one that the other machines can reach. `ranks` is how many
    of the run's it has, by default as many as the others.
    """

    name: _Word
    address: _Address | None = None
    user: _Word | None = None
    port: int | None = Field(None, ge=1, le=65535)
    checkout: _FilePath
    python: _FilePath = ".venv/bin/python"
    interface: _Word | None = None
    ranks: int | None = Field(None, ge=1)
    environment: dict[_Variable, str] = {}

    @property
    def destination(self) -> str:
        """The argument of ssh; without an address, the name, which may be an alias of ssh's."""
        address = self.address or self.name
        return f"{self.user}@{address}" if self.user else address

    @property
    def name_in_run(self) -> str:
        return as_name(self.name)

    @property
    def variables(self) -> dict[str, str]:
        own = {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}
        return {"PYTHONUNBUFFERED": "1", NAME: self.name_in_run} | own | self.environment

    @model_validator(mode="after")
    def _one_interface(self) -> Self:
        if self.interface and "GLOO_SOCKET_IFNAME" in self.environment:
            raise ValueError(
                f"interface = {self.interface!r}: environment sets GLOO_SOCKET_IFNAME too; "
                "remove one of them"
            )
        return self


class HostsConfig(BaseModel, frozen=True, extra="forbid"):
    """The machines of a run, with rendezvous at `rdzv`, by default on the first one."""

    rdzv: str | None = None
    host: tuple[HostConfig, ...] = Field(min_length=1)

    @property
    def endpoint(self) -> str:
        first = self.host[0]
        return self.rdzv or format_endpoint(first.address or first.name, _RENDEZVOUS_PORT)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [host.name for host in self.host]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"host.name = {twice!r}: duplicate; give each host its own name")
        unequal = [host.ranks is not None for host in self.host]
        if any(unequal) and not all(unequal):
            raise ValueError(
                f"host.{unequal.index(False)}.ranks: not given, as other hosts have it; give every "
                "host its ranks, or none"
            )
        parse_endpoint(self.endpoint, "rdzv")
        return self


def load_hosts(path: Path) -> HostsConfig:
    """Read the hosts file; ConfigError names file, key, value and remedy."""
    keys = top_keys(path)
    if keys & _OF_RUNS and not keys & HostsConfig.model_fields.keys():
        raise ConfigError(
            f"{path}: a run file; the hosts file comes first: thinpipe launch HOSTS.TOML RUN.TOML"
        )
    return load_as(HostsConfig, path)


def check_shares(hosts: HostsConfig, run: str, world: int, placed: Sequence[str] = ()) -> None:
    """ConfigError if machines cannot share the run's ranks, of which `placed` names the hosts."""
    for host in hosts.host:
        own = placed.count(host.name_in_run)
        if placed and host.ranks not in (None, own):
            raise ConfigError(
                f"ranks = {host.ranks} of {host.name}: pipeline.placement gives it {own}; correct "
                "one of the two"
            )
    shares, machines = [host.ranks for host in hosts.host if host.ranks], len(hosts.host)
    if shares and sum(shares) != world:
        total = f"{' + '.join(map(str, shares))} = " if machines > 1 else ""
        raise ConfigError(
            f"{run}: the hosts file has {total}{sum(shares)} ranks, the run has {world} (stages x "
            "replicas); correct one of the two"
        )
    if not shares and not placed and world % machines:
        fitting = [str(n) for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(
            f"{run}: {machines} machines cannot share {world} ranks (stages x replicas) evenly; "
            f"with {world} ranks a hosts file lists {' or '.join(fitting)} machines, or gives each "
            "its `ranks`"
        )


def rendezvous(hosts: HostsConfig) -> str:
    """The endpoint for all machines: an alias of this one's ssh is what it stands for."""
    name, port = parse_endpoint(hosts.endpoint)
    said = b""
    with contextlib.suppress(OSError, SubprocessError):  # whoever connects will report it
        said = check_output(["ssh", "-G", name], stderr=DEVNULL, timeout=_ALIAS_S)
    found = re.search(r"^hostname (.+)$", said.decode(errors="replace"), re.MULTILINE)
    if found is not None and found[1] != name.lower():
        name = found[1]
    return format_endpoint(name, port)
