"""`thinpipe watch`: its options, and the link that it prints."""

import contextlib
import errno
import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from thinpipe.launch.host.interfaces import format_endpoint, interfaces, parse_endpoint
from thinpipe.launch.host.interfaces import resolve as address_of
from thinpipe.launch.host.interfaces import serve as listen_at
from thinpipe.launch.host.packages import explain
from thinpipe.launch.view.report.content import Story
from thinpipe.launch.view.watch.follow import Followed

_LEAST = 19  # the lowest priority that nice has
LOOPBACK = "127.0.0.1:8042"


def watch(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folders of runs; with --terminal also a link."),
    ],
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Where to serve the page; to other machines, only with the token of the link.",
        ),
    ] = LOOPBACK,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", metavar="FILE", help="Write the page as one file, and serve nothing."
        ),
    ] = None,
    share: Annotated[
        Path | None,
        typer.Option(
            "--share",
            metavar="FILE",
            help="Draw a picture of 1200 x 630 pixels, and serve nothing.",
        ),
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show the numbers in this terminal instead.")
    ] = False,
    with_parent: Annotated[
        bool, typer.Option("--with-parent", help="End when standard input does.")
    ] = False,
) -> None:
    """Show runs, live: on a page, in a terminal, as a file or a picture."""
    try:
        if terminal:
            _reject_others(listen, export, share)
            from thinpipe.launch.view.watch.terminal import show

            show(runs)
            return
        followed = [Followed(_folder(run)) for run in runs]
        if export is not None:
            _export(followed, export)
        if share is not None:
            from thinpipe.launch.view.watch.share import draw

            draw(_stories(followed), share)
        for written in filter(None, (export, share)):
            typer.echo(str(written))
        if export is None and share is None:
            if with_parent:
                give_way()
            _serve(followed, listen, of_run=with_parent)
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"{'warning' if with_parent else 'error'}: {explain(error)}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _reject_others(listen: str, export: Path | None, share: Path | None) -> None:
    given = {"--listen": listen != LOOPBACK, "--export": export, "--share": share}
    if also := [option for option, value in given.items() if value]:
        raise ValueError(f"--terminal shows the numbers here alone; remove {', '.join(also)}")


def _folder(run: str) -> Path:
    if run.startswith(("http://", "https://")):
        raise ValueError(f"{run}: open the link in a browser, or add --terminal")
    return Path(run)


def _stories(runs: list[Followed]) -> list[Story]:
    for run in runs:
        if run.story is None:
            raise ValueError(f"{run.folder}: no step was recorded yet; wait for the first one")
    return [run.story for run in runs if run.story is not None]


def _export(runs: list[Followed], file: Path) -> None:
    from thinpipe.launch.view.report.compare import write_page

    write_page(file, _stories(runs))


def _serve(runs: list[Followed], listen: str, *, of_run: bool) -> None:
    from thinpipe.launch.view.watch.server import serve

    try:
        host, port = parse_endpoint(listen)
    except ValueError:
        raise ValueError(
            f"--listen = {listen}: write an address and a port, as in 0.0.0.0:8042"
        ) from None
    address = address_of(host)
    alone = address.startswith("127.") or address == "::1"
    token = None if alone else secrets.token_urlsafe(18)
    try:
        sock = listen_at((address, port))
    except OSError as error:
        problem = os.strerror(error.errno or 0)  # its own text names the address again
        why = f"--listen = {listen}: {problem}; give another port, as in --listen "
        why += format_endpoint(host, port + 1)
        if error.errno == errno.EADDRNOTAVAIL:
            why = f"--listen = {listen}: this machine has no such address; it has "
            why += ", ".join(_names("0.0.0.0"))
        if of_run:
            why = f"watch.port = {port}: {problem}; the run goes on without its page"
        raise ValueError(why) from None
    links = [
        f"http://{format_endpoint(name, sock.getsockname()[1])}/" + (f"#{token}" if token else "")
        for name in _names(address)
    ]
    _say(links, token)
    serve(runs, address, sock, token, with_input=of_run)


def _names(address: str) -> list[str]:
    """What other machines may write for an address of this one."""
    if address not in ("0.0.0.0", "::"):
        return ["localhost" if address == "127.0.0.1" else address]
    found = [a for interface in interfaces().values() for a in interface.addresses]
    usable = [a for a in found if not a.startswith(("127.", "::1", "fe80:"))]
    if address == "0.0.0.0":
        usable = [a for a in usable if ":" not in a]
    return usable or ["localhost"]


def _say(links: list[str], token: str | None) -> None:
    for link in links:
        typer.echo(f"watch at {link}")
    if token is not None:
        typer.echo("who has the link can read the page, and so can who listens on the way")
        if sys.stdout.isatty():
            import segno

            segno.make(links[0]).terminal(compact=True)
    sys.stdout.flush()


def give_way() -> None:
    """Let this process have only the CPU time that others leave.

    Linux shares CPUs among sessions first (`sched_autogroup`), and `nice` counts only within one.
    So a process that leads a session makes all of that give way; others would slow their user's.
    """
    os.nice(_LEAST)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # no such kernel
            Path("/proc/self/autogroup").write_text(str(_LEAST), encoding="ascii")
