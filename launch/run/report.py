"""`thinpipe report`: the report of runs, from what their folders hold."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from thinpipe.launch.config.cli_options import reject
from thinpipe.launch.config.run import load_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host import disk
from thinpipe.launch.run.records import describe_run
from thinpipe.launch.view.report.compare import write_page
from thinpipe.launch.view.report.content import Story
from thinpipe.launch.view.report.html import write_report
from thinpipe.launch.view.report.journal import STATE, Journal, Told, add_note, read_notes, silent_s
from thinpipe.launch.view.report.metrics import read_metrics
from thinpipe.launch.view.report.summary import summarize
from thinpipe.launch.view.report.timeline import FILE_NAME, read_timeline


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN_FOLDER...", help="Folders of runs.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Page of several runs, by default comparison.html."
        ),
    ] = None,
) -> None:
    """Write the report of a run, also of one under way; several runs are compared on one page."""
    try:
        runs = [_read(folder) for folder in folders]
        if len(runs) > 1:
            page = out or Path("comparison.html")
            write_page(page, runs)
            typer.echo(str(page))
            return
        if out is not None:
            raise ConfigError(
                f"--out = {out}: is for several runs; remove it, as the report of one is written "
                f"to {folders[0]}/report.html"
            )
        typer.echo(str(write_report(runs[0])))
    except (ValueError, OSError) as error:
        reject(error)


def add_samples(folder: Path, texts: Sequence[str]) -> None:
    """Add what the model of a run wrote at its end to what its page shows.

    A full disk or a damaged file is no reason to call a run that was trained and saved failed.
    """
    try:
        story = _read(folder)
        for text in texts:
            add_note(folder, text, story.records[-1].step, "sample")
        write_report(replace(story, notes=read_notes(folder)))
    except (OSError, ValueError) as error:
        why = disk.why(error, folder) if isinstance(error, OSError) else str(error)
        disk.warn_once("samples", f"{folder}/report.html lacks the samples: {why}")


def _read(folder: Path) -> Story:
    """The content of a run's folder; what `thinpipe watch` needs of it is added if it lacks it."""
    for name in ("config.toml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: holds no {name}; name the folder of a run")
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        raise ValueError(f"{folder}: no step was recorded yet; wait for the first one")
    state = None
    if not (folder / STATE).is_file():
        config = load_config(folder / "config.toml", [f"run.folder={folder}"])
        per_epoch = max((r.step for r in records if r.epoch == 1), default=records[-1].step)
        steps = max(records[-1].step, config.train.steps(per_epoch))
        journal = Journal(describe_run(config, steps), ())
        journal.write()
        state = journal.state()  # the folder may be read-only
    told = Told(folder, state)
    events = read_timeline(folder).events if (folder / FILE_NAME).is_file() else ()
    summary = summarize(told.info, records, told.edges)
    about = (told.places, read_notes(folder), (), told.ended, silent_s(folder))
    return Story(told.info, records, summary, events, told.traces, *about)
