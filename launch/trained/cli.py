"""Commands that take a trained model home: `thinpipe export` and `thinpipe generate`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from thinpipe.launch.config.cli_options import reject
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.trained.export_hf import ExportDtype, ExportFormat, export
from thinpipe.launch.trained.generate import Conversation, Sampling, generate, sample_lines
from thinpipe.launch.trained.model import read_trained, save_safetensors


def _step(text: str) -> int | str:
    if text != "best" and not (text.isdecimal() and int(text)):
        raise typer.BadParameter(f"{text!r} is no step: give a number from 1, or best")
    return text if text == "best" else int(text)


StepOption = Annotated[
    Any,
    typer.Option(
        "--step",
        parser=_step,
        metavar="STEP",
        help="Step of the checkpoint, or best (eval.best); by default the newest.",
    ),
]


def show_samples(config: RunConfig) -> list[str]:
    """Print what the model of a run writes at its end, and return the texts alone."""
    lines = sample_lines(config)
    for line in lines:
        print(line)
    return [line.strip() for line in lines[1:-1]]


def export_model(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of a run.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="New folder, or with --format safetensors a file.")
    ],
    step: StepOption = None,
    dtype: Annotated[
        ExportDtype,
        typer.Option("--dtype", metavar="DTYPE", help="Dtype: source (unchanged), fp32 or bf16."),
    ] = "source",
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="hf: a folder for from_pretrained; peft: LoRA's adapter alone; safetensors: the "
            "whole state dict in a file.",
        ),
    ] = "hf",
) -> None:
    """Export a run's model. LoRA is merged, but for --format peft."""
    try:
        if form == "peft":
            from thinpipe.launch.trained.export_peft import export_adapter

            notes = export_adapter(run_folder, out, step=step, dtype=dtype)
        elif form == "safetensors":
            trained = read_trained(run_folder, step=step)
            save_safetensors(trained, out)
            notes = [f"step {trained.step} of {run_folder}, {len(trained.tensors)} tensors"]
        else:
            notes = export(run_folder, out, step=step, dtype=dtype)
    except (ValueError, OSError) as error:
        reject(error)
    else:
        typer.echo("\n".join([f"{out}: {notes[0]}", *notes[1:]]))


def generate_text(  # noqa: PLR0913  # one parameter per option
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of a run.")],
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", metavar="TEXT", help="Text to continue, or with --chat to answer."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Answer in the run's chat template; questions from input."),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Most tokens to write.")
    ] = 128,
    temperature: Annotated[
        float,
        typer.Option("--temperature", min=0, help="0 takes the likeliest token; 1 samples as is."),
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="Sample from the k likeliest tokens; 0: all.")
    ] = 40,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, help="Random seed for sampling.")
    ] = 0,
    step: StepOption = None,
) -> None:
    """Continue a prompt with a trained model, or talk with it."""
    try:
        sampling = Sampling(max_tokens, temperature, top_k, seed)
        if chat:
            _talk(Conversation(run_folder, step=step), prompt, sampling)
            return
        if prompt is None:
            raise ConfigError("--prompt: is missing; give the text to continue, or add --chat")
        pieces = iter(generate(run_folder, prompt, sampling, step=step))
        typer.echo(f"{prompt}{next(pieces, '')}", nl=False)  # if all is well
        _print(pieces)
    except (ValueError, OSError, ImportError) as error:
        reject(error)


def _talk(conversation: Conversation, prompt: str | None, sampling: Sampling) -> None:
    if prompt is not None:
        _print(conversation.answer(prompt, sampling))
        return
    shown = "> " if sys.stdin.isatty() else ""
    while True:
        typer.echo(shown, nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            _print(conversation.answer(line.strip(), sampling))


def _print(pieces: Iterator[str]) -> None:
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()
