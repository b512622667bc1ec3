"""`thinpipe doctor run.toml --nnodes 3 --rdzv host0:29500`, the same on every host."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinpipe.launch.config.cli_options import SetOption, refuse
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.doctor.checks import check_all, names_of
from thinpipe.launch.doctor.finding import Finding, problem
from thinpipe.launch.doctor.host import HostFacts, choose_interface, examine
from thinpipe.launch.doctor.links import listen, measure_links
from thinpipe.launch.doctor.meeting import DoctorError, meet
from thinpipe.launch.doctor.report import as_network, draw_links, show_findings, show_links
from thinpipe.launch.host.interfaces import parse_endpoint, reachable_address
from thinpipe.launch.host.packages import explain

HEALTHY, ILL = 0, 1


def doctor(
    config_path: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run to come.")],
    overrides: SetOption = None,
    nnodes: Annotated[int, typer.Option(min=1, help="How many hosts; the same on each.")] = 1,
    rdzv: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where they meet: one of them, as for train."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="NET.JSON", help="For plan; a picture lies beside it.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="To measure each link for.")] = 1.0,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for other hosts.")] = 60.0,
) -> None:
    """Examine the hosts of a run and the links between them, and say what to put right.

    Exits with 1 if something keeps the run from starting.
    """
    logging.getLogger("torch").setLevel(logging.ERROR)
    console = Console()
    try:
        config = load_config(config_path, overrides or [])
        if config.world_size % nnodes:
            raise ValueError(
                f"--nnodes = {nnodes}: {config.world_size} ranks (stages x replicas) cannot be "
                "shared evenly by that many hosts; change the stages, the replicas or --nnodes"
            )
        if nnodes > 1 and rdzv is None:
            raise ValueError(f"--nnodes = {nnodes}: say where they meet: --rdzv host0:29500")
        if save is not None and not save.absolute().parent.is_dir():
            raise ValueError(f"--save = {save}: no such folder; make it, or name another")
        endpoint = parse_endpoint(rdzv or "127.0.0.1:29500")
    except ValueError as error:
        refuse(error)
    examination = _Examination(config, nnodes, window_s=seconds, wait_s=wait)
    try:
        findings = examination.run(console, endpoint, save)
    except (ValueError, OSError, ImportError, DoctorError) as error:
        findings = [*examination.findings, problem("this host", explain(error), "")]
    show_findings(console, findings)
    sys.exit(ILL if any(finding.level == "problem" for finding in findings) else HEALTHY)


class _Examination:
    """`findings` are those of this host so far."""

    def __init__(self, config: RunConfig, nnodes: int, *, window_s: float, wait_s: float) -> None:
        self._config, self._nnodes = config, nnodes
        self._window_s, self._wait_s = window_s, wait_s
        self.findings: list[Finding] = []

    def run(self, console: Console, endpoint: tuple[str, int], save: Path | None) -> list[Finding]:
        """Examine; the findings of all hosts, the same on each."""
        host, port = endpoint
        address = reachable_address(host)
        chosen, self.findings = choose_interface(address)
        with listen(chosen.address) as server:
            own_port = server.getsockname()[1]
            facts = examine(self._config, chosen, port=own_port, nnodes=self._nnodes)
            self.findings += [Finding(**finding) for finding in facts.findings]
            facts.findings[:] = [finding.as_json() for finding in self.findings]
            meeting = meet((address, port), chosen.address, self._nnodes, wait_s=self._wait_s)
            hosts = [HostFacts(**told) for told in meeting.gather("host", vars(facts))]
            links = measure_links(meeting, hosts, server, window_s=self._window_s)
            meeting.end()
        names = names_of(hosts)
        if links:
            show_links(console, names, links)
        if save is not None:
            as_network(len(hosts), links).write(save)
            draw_links(save.with_suffix(".png"), names, links)
            console.print(f"written: {save}, {save.with_suffix('.png')}", soft_wrap=True)
        told = [Finding(**finding) for facts in hosts for finding in facts.findings]
        return [*told, *check_all(hosts, links)]
