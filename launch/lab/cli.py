"""`thinpipe shaped`: runs a command on every emulated host; `thinpipe shaped set` changes rates."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from thinpipe.launch.config.cli_options import reject, run_app
from thinpipe.launch.host.links import PAYLOAD_SHARE, format_rate, links
from thinpipe.launch.lab import control
from thinpipe.launch.lab.commands import run_command
from thinpipe.launch.lab.linux import ShapedError
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.probe import probe_link
from thinpipe.launch.lab.spec import Change, NetworkSpec

RateOption = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="Rate of every up- and downlink: 100mbit, or none."),
]
UpOption = Annotated[
    str | None, typer.Option(metavar="RATES", help="Uplinks: one rate, or one per host, r0,r1,..")
]
DownOption = Annotated[
    str | None, typer.Option(metavar="RATES", help="Downlinks: one rate, or one per host.")
]
PairOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="I,J=RATE",
        help="Limit between two hosts in both directions; may be repeated. none removes it.",
    ),
]


def shaped(  # noqa: PLR0913  # one parameter per option
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- CMD", help="{rank} {host} {addr} {master} are replaced."),
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Number of hosts to emulate.")] = None,
    rate: RateOption = None,
    delay: Annotated[str | None, typer.Option(metavar="TIME", help="One-way delay: 20ms.")] = None,
    up: UpOption = None,
    down: DownOption = None,
    pair: PairOption = None,
    matrix: Annotated[
        Path | None,
        typer.Option(metavar="NET.JSON", help="Links with rate_bps, latency_s: a row per sender."),
    ] = None,
    show: Annotated[
        int | None, typer.Option(metavar="HOST", help="Connect only this host to the terminal.")
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Measure every link first.")] = False,
) -> None:
    """Run a command on emulated hosts behind slow links.

    `thinpipe shaped set` changes the rates during the run.
    """
    command = command or []
    if command[:1] == ["set"]:
        run_app(set_app, command[1:], program="thinpipe shaped set")
    try:
        if not command and not probe:
            raise ValueError("nothing to run; end with -- and a command, or give --probe")
        spec = NetworkSpec.of(
            hosts, rate, delay=delay, up=up, down=down, pairs=pair or [], matrix=matrix
        )
        with ShapedNetwork(spec) as network:
            _announce(network)
            if probe:
                _print_probe(network)
            sys.exit(run_command(network, command, show) if command else 0)
    except (ValueError, ShapedError) as error:
        reject(error)


set_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@set_app.command()
def set_rates(
    rate: RateOption = None,
    up: UpOption = None,
    down: DownOption = None,
    pair: PairOption = None,
    run: Annotated[
        int | None, typer.Option(help="Number of the run, if there are several.")
    ] = None,
) -> None:
    """Change the rates of a run, from another terminal or from one of its hosts."""
    try:
        if not (rate or up or down or pair):
            raise ValueError("nothing to change; give --rate, --up, --down or --pair")
        change = Change(rate=rate, up=up, down=down, pairs=pair or [])
        print(control.request(change, run))
    except ValueError as error:
        reject(error)


def _announce(network: ShapedNetwork) -> None:
    text = f"{network.hosts} hosts, {control.describe(network.spec)}"
    if delays := network.spec.delay_s.values():
        span = [f"{delay * 1e3:g}" for delay in (min(delays), max(delays))]
        text += f", {'-'.join(dict.fromkeys(span))} ms one way"
    print(f"{text}; run {network.run_id}", file=sys.stderr, flush=True)


def _print_probe(network: ShapedNetwork) -> None:
    console = Console(stderr=True)
    table = Table("link", "nominal", "achieved", "ratio", "round trip", "nominal")
    with console.status("measuring idle links") as status:
        for source, target in links(network.hosts):
            status.update(f"measuring {source} -> {target}")
            link = probe_link(network, source, target)
            table.add_row(
                f"{source} -> {target}",
                format_rate(link.nominal_bps),
                format_rate(link.achieved_bps),
                "" if link.ratio is None else f"{link.ratio:.3f}",
                f"{link.round_trip_s * 1e3:.2f} ms",
                f"{link.nominal_round_trip_s * 1e3:g} ms",
            )
    console.print(table)
    console.print(f"at most {PAYLOAD_SHARE:.3f} of a rate is payload: the rest is headers")
