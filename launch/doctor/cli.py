"""`thinpipe doctor run.toml --nnodes 3 --rdzv host0:29500`, the same on every host."""

import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinpipe.launch import preflight
from thinpipe.launch.config.cli_options import (
    Machines,
    RanksOption,
    SetOption,
    check_environment,
    reject,
)
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.doctor.checks import check_all, check_reachable, names_of
from thinpipe.launch.doctor.group import DoctorError, join_group
from thinpipe.launch.doctor.host import (
    MEASURING_S,
    CheckResult,
    HostInfo,
    as_hosts,
    check_host,
    check_key,
    describe_host,
    own_devices,
    problem,
    untimed,
)
from thinpipe.launch.doctor.links import LinkInfo, listen, measure_links
from thinpipe.launch.host.interfaces import format_endpoint, parse_endpoint, reachable_address
from thinpipe.launch.host.links import MAX_RATE_BPS, MIN_RATE_BPS, PAYLOAD_SHARE, format_rate
from thinpipe.launch.host.network import Host, Network, Rate
from thinpipe.launch.host.packages import explain
from thinpipe.launch.net.machines import several_machines
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.ranks.network import HostNetwork

_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(  # noqa: PLR0913  # one parameter per option
    config_path: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run file.")],
    overrides: SetOption = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Number of hosts; the same on each.")] = 1,
    rdzv: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="One of the hosts, where they connect; as for train."
        ),
    ] = None,
    ranks: RanksOption = None,
    save: Annotated[
        Path | None, typer.Option(metavar="NET.JSON", help="Write the links, for plan.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds to measure each link.")] = 1.0,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for other hosts.")] = 60.0,
) -> None:
    """Check the hosts of a run and the links between them; print problems and remedies.

    Exits with 1 if the run could not start.
    """
    logging.getLogger("torch").setLevel(logging.ERROR)
    console = Console()
    try:
        Machines(nnodes, rdzv, ranks).check()
        check_environment()
        config = load_config(config_path, overrides or [])
        shares = preflight.shares_here(config, nnodes, ranks)
        if save is not None and not save.absolute().parent.is_dir():
            raise ValueError(f"--save = {save}: no such folder; create it, or use another")
        if save is not None and save.is_dir():
            raise ValueError(f"--save = {save}: a folder; name a file in it")
        endpoint = parse_endpoint(rdzv or "127.0.0.1:29500")
    except ValueError as error:
        reject(error)
    diagnosis = _Diagnosis(config, nnodes, shares, window_s=seconds, wait_s=wait)
    try:
        results = diagnosis.run(console, endpoint, save)
    except (ValueError, OSError, ImportError, DoctorError, OverlayError) as error:
        results = [*diagnosis.results, problem("this host", explain(error), "")]
    show_results(console, results)
    sys.exit(int(any(r.level == "problem" for r in results)))


@dataclass
class _Diagnosis:
    config: RunConfig
    nnodes: int
    shares: Sequence[preflight.Share]
    window_s: float
    wait_s: float
    results: list[CheckResult] = field(default_factory=list)

    def run(
        self, console: Console, endpoint: tuple[str, int], save: Path | None
    ) -> list[CheckResult]:
        with closing(self._join(endpoint)) as network, listen(network) as server:
            sized, (_, port) = self._check_host(), server.getsockname()[:2]
            info = describe_host(self.config, network.address, port=port, results=self.results)
            group = join_group(network, self.nnodes, wait_s=self.wait_s)
            hosts = [HostInfo(**fields) for fields in group.gather("info", vars(info))]
            links = measure_links(group, hosts, server, network, self.window_s, typer.echo)
            devices: list[dict[str, Any]] = []
            if any(group.gather("save", save is not None)):
                own_device = own_devices(sized) if sized else {}
                devices = group.gather("device", own_device, MEASURING_S)
            group.close()
            hidden = check_reachable(network.overlay.peer_list) if network.overlay else []
        names = names_of(hosts)
        if links:
            show_links(console, names, links)
        if save is not None:
            as_network(links, as_hosts(names, devices)).write(save)
            console.print(f"written: {save}", soft_wrap=True)
        own = [CheckResult(**result) for host in hosts for result in host.results]
        return [*own, *hidden, *check_all(hosts, links), *untimed(names, devices)]

    def _check_host(self) -> RunConfig | None:
        try:
            ready = preflight.check_settings(self.config, self.shares)
        except (ValueError, OSError, ImportError) as error:
            self.results.append(problem(self.config.network.own_name(), explain(error), ""))
            return None
        self.results += check_host(ready, self.shares)
        return ready.config

    def _join(self, endpoint: tuple[str, int]) -> HostNetwork:
        host, port = endpoint
        config, address = self.config.network, reachable_address(host)
        patience_s = min(config.patience_s, self.wait_s / 2)
        here = self.nnodes == 1 or ip_address(address).is_loopback
        if not (here or config.trusted):
            self.results += [check_key(config)]
        return several_machines(
            config.model_copy(update={"patience_s": patience_s}),
            format_endpoint(host, port),
            self.nnodes,
            limit_s=self.wait_s,
            log=typer.echo,
        )


def show_results(console: Console, results: Sequence[CheckResult]) -> None:
    """Print all results, the worst last, so that they stay visible in a terminal."""
    order = list(_STYLES)
    for result in sorted(results, key=lambda f: order.index(f.level)):
        head = f"[{_STYLES[result.level]}]{result.level:7}[/] {result.where}: "
        console.print(head, end="", highlight=False)
        console.print(result.text, markup=False, highlight=False, soft_wrap=True)
        if result.remedy:
            console.print(f"        -> {result.remedy}", markup=False, soft_wrap=True)


def show_links(console: Console, names: Sequence[str], links: Sequence[LinkInfo]) -> None:
    """Rate and round trip: a row per sender, a column per receiver."""
    table = Table("from \\ to", *names, title="payload rate, round trip", title_justify="left")
    by_pair = {(link.source, link.target): link for link in links}
    for source, name in enumerate(names):
        cells = [_cell(by_pair.get((source, target))) for target in range(len(names))]
        table.add_row(name, *cells)
    console.print(table)


def as_network(links: Sequence[LinkInfo], known: tuple[Host, ...]) -> Network:
    """The network of these hosts as `plan` reads it; a closed link has the lowest rate.

    Latency is half of a round trip.
    """
    hosts = len(known)
    rates: list[list[Rate]] = [[None] * hosts for _ in range(hosts)]
    delays = [[0.0] * hosts for _ in range(hosts)]
    for link in links:
        nominal_bps = link.rate_bps / PAYLOAD_SHARE
        rates[link.source][link.target] = min(max(nominal_bps, MIN_RATE_BPS), MAX_RATE_BPS)
        delays[link.source][link.target] = link.round_trip_s / 2
    return Network(tuple(map(tuple, rates)), tuple(map(tuple, delays)), known)


def _cell(link: LinkInfo | None) -> str:
    if link is None:
        return ""
    if link.closed:
        return "closed"
    return f"{format_rate(link.rate_bps)}, {link.round_trip_s * 1e3:.3g} ms"
