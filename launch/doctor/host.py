"""What one host says of itself: interface, kernel settings, room, versions, config."""

import ipaddress
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.corpus import check_data
from thinpipe.launch.distributed.handshake import versions
from thinpipe.launch.doctor.finding import Finding, ok, problem, warning
from thinpipe.launch.host.interfaces import Interface, interface_to, interfaces
from thinpipe.launch.host.packages import explain
from thinpipe.launch.host.resources import free_memory
from thinpipe.launch.plan.memory_budget import needs, plan_memory
from thinpipe.launch.plan.profile import checkpoint_nbytes, training_nbytes
from thinpipe.pipeline.models.build import stage_counts

_SYSCTL = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class HostFacts:
    """One host, JSON-able. Sizes in bytes; `port` is where it listens during the examination."""

    name: str
    address: str
    port: int
    interface: str
    mtu: int
    send_buffer: int
    receive_buffer: int
    slow_start_after_idle: bool
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    findings: list[dict[str, Any]] = field(default_factory=list)


def examine(config: RunConfig, chosen: Interface, *, port: int, nnodes: int) -> HostFacts:
    """Everything that can be seen without the other hosts; `chosen` is the interface to use."""
    name = socket.gethostname()
    findings = [*_room(config, name, nnodes), _devices(name)]
    return HostFacts(
        name=name,
        address=chosen.address,
        port=port,
        interface=chosen.name,
        mtu=chosen.mtu,
        send_buffer=_largest("tcp_wmem"),
        receive_buffer=_largest("tcp_rmem"),
        slow_start_after_idle=_sysctl("tcp_slow_start_after_idle", "1") == "1",
        versions=versions(),
        config=config.shared(),
        findings=[finding.as_json() for finding in findings],
    )


def choose_interface(rendezvous: str) -> tuple[Interface, list[Finding]]:
    """The interface that gloo will use to reach the other hosts, and what is wrong with it.

    `rendezvous` is an address. Where GLOO_SOCKET_IFNAME is no use, the one that leads there is
    taken, so that the examination can go on.

    Raises:
        ValueError: no interface leads there.
    """
    where, known = socket.gethostname(), interfaces()
    right = interface_to(rendezvous)
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    remedy = f"export GLOO_SOCKET_IFNAME={right.name}"
    if wanted is None:
        return right, _without_a_name(where, right, remedy)
    names = ", ".join(sorted(known))
    if wanted not in known:
        return right, [
            problem(
                where,
                f"GLOO_SOCKET_IFNAME = {wanted!r}: {_not_an_interface(wanted)}; there are {names}",
                remedy,
            )
        ]
    if known[wanted].is_loopback and not right.is_loopback:
        text = f"GLOO_SOCKET_IFNAME = {wanted!r}: reaches this host only"
        return right, [problem(where, text, remedy)]
    if wanted != right.name:
        text = f"GLOO_SOCKET_IFNAME = {wanted!r}, but the way to {rendezvous} is {right.name}"
        return known[wanted], [warning(where, text, remedy)]
    return right, [ok(where, f"interface {right.name}, {right.address}, MTU {right.mtu}")]


def _without_a_name(where: str, right: Interface, remedy: str) -> list[Finding]:
    try:
        own = socket.gethostbyname(where)
    except OSError:
        own = ""
    if (own and not ipaddress.ip_address(own).is_loopback) or right.is_loopback:
        return [ok(where, f"interface {right.name}, {right.address}, MTU {right.mtu}")]
    text = (
        f"GLOO_SOCKET_IFNAME is not set, and the host's own name {where} "
        + (f"resolves to {own}" if own else "does not resolve")
        + "; `thinpipe train --nnodes` finds the interface by itself, torchrun does not"
    )
    return [warning(where, text, remedy)]


def _not_an_interface(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        wrong = set(text) & set("^,=")
        return "gloo wants the name of one interface" if wrong else "no such interface"
    return "gloo wants an interface's name, not its address"


def _room(config: RunConfig, where: str, nnodes: int) -> list[Finding]:
    """Memory and disk, against what this host's share of the model needs at least."""
    share = config.pipeline.replicas / nnodes
    held, trained = stage_counts(config.model, config.pipeline.cuts)
    memory, need = free_memory(), share * training_nbytes(held, trained)
    counted = "weights, gradients and Adam"
    sequences, wrong = _sequences(config, where)
    ends = plan_memory(config, sequences) if sequences else []
    ranks = config.world_size // nnodes
    starts = range(0, config.world_size, ranks)
    memories = max(needs(config, ends, range(first, first + ranks)).ram for first in starts)
    if memories:
        need, counted = need + memories, f"{counted} and AQ-SGD's memories"
    text = f"{memory / 1e9:.3g} GB of memory free; {counted} need {need / 1e9:.3g} GB"
    findings = [*wrong, ok(where, text)]
    if memory < need:
        remedy = "use more hosts, a smaller model or memory.budget, or end what else runs here"
        findings = [*wrong, problem(where, text, remedy)]
    folder = next(p for p in (config.run.path, *config.run.path.parents) if p.exists())
    copies = config.checkpoint.keep + 1  # a new one is complete before an old one goes
    disk, need = shutil.disk_usage(folder).free, share * copies * checkpoint_nbytes(held, trained)
    if disk < need:
        findings.append(
            problem(
                where,
                f"{folder} has {disk / 1e9:.3g} GB free; {copies} checkpoints need "
                f"{need / 1e9:.3g} GB",
                "free some space, put run.folder on another disk, or lower checkpoint.keep",
            )
        )
    else:
        findings.append(ok(where, f"{disk / 1e9:.3g} GB of disk free for run.folder"))
    return findings


def _sequences(config: RunConfig, where: str) -> tuple[int, list[Finding]]:
    """How many samples there are to train on, which "all" leaves to the data."""
    if config.data.train_sequences != "all":
        return config.data.train_sequences, []
    try:
        return len(check_data(config).train), []
    except (ValueError, OSError, ImportError) as error:
        return 0, [problem(where, explain(error), "")]


def _devices(where: str) -> Finding:
    if not torch.cuda.is_available():
        return ok(where, f"{os.cpu_count()} processor cores, no GPU")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ok(where, f"{os.cpu_count()} processor cores, GPUs: {', '.join(names)}")


def _largest(name: str) -> int:
    return int(_sysctl(name, "0 0 0").split()[2])


def _sysctl(name: str, default: str) -> str:
    try:
        return (_SYSCTL / name).read_text().strip()
    except OSError:
        return default
