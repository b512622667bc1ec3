"""Talking with a model, and samples of a run, in the chat template that it trained with."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.commands import Command
from tests.huggingface import saved_model
from tests.invoking import printed
from tests.launch.data.chat.styles import STYLES
from tests.launch.data.chat.styles import saved as tokenizer_of
from tests.launch.trained.test_model import run_of, saved
from tests.ports import free_port
from tests.waiting import PATIENCE_S
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.corpus import check_data
from thinpipe.launch.trained.generate import Conversation, Sampling, _Writer, sample_lines

SAID = [
    {"from": "human", "value": "2 + 2?"},
    {"from": "gpt", "value": "4"},
    {"from": "human", "value": "And 3 + 3?"},
    {"from": "gpt", "value": "6"},
]


def _run(folder: Path, **data: Any) -> RunConfig:
    path = folder / "talk.jsonl"
    path.write_text(f"{json.dumps({'conversations': SAID})}\n" * 40)
    settings = {"path": str(path), "messages_field": "conversations", "chat_template": "plain"}
    sizes = {"sequence_length": 128, "train_sequences": "all", "eval_sequences": "all"}
    return run_of(folder / "run", model={"context": 128}, data={**settings, **sizes, **data})


def test_questions_and_answers_are_written_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path)
    saved(run, steps=0)
    given: list[bytes] = []
    answers = iter(["4", "6"])

    def write(_self: _Writer, ids: list[int], _sampling: Sampling) -> Any:
        given.append(bytes(ids))
        yield next(answers)

    monkeypatch.setattr(_Writer, "write", write)
    talk = Conversation(run.run.path)
    for question in ("2 + 2?", "And 3 + 3?"):
        list(talk.answer(question, Sampling()))
    batch = check_data(run).train.batch([0])
    trained = bytes(batch.inputs_BT[0].tolist())
    assert trained.startswith(given[1])
    assert given[1].startswith(given[0])
    learnt = batch.targets[0]
    for prompt in given:  # the next token is the first that is learnt
        assert learnt[len(prompt) - 1] != -100
        assert learnt[len(prompt) - 2] == -100


def test_the_command_talks(tmp_path: Path) -> None:
    run = _run(tmp_path)
    saved(run, steps=0)
    words = ["generate", run.run.path, "--chat", "--max-tokens", "3"]
    one = printed(*words, "--prompt", "2 + 2?")
    assert not one.startswith("2 + 2?")
    assert printed(*words, typed="2 + 2?\n\nAnd 3 + 3?\n").startswith(one)
    missing = "--prompt: is missing; give the text to continue, or add --chat"
    assert missing in printed(*words[:2], code=2)


def test_a_run_without_a_template_does_not_talk(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "2 + 2 = ", "a": "4"}\n' * 40)
    fields = {"path": str(path), "prompt_field": "q", "response_field": "a"}
    run = run_of(tmp_path / "run", data=fields)
    saved(run, steps=0)
    output = printed("generate", run.run.path, "--chat", "--prompt", "a", code=2)
    assert "was trained on prompts without a chat template; use --prompt" in output


def test_samples_at_the_end_of_a_run_answer_held_out_questions(tmp_path: Path) -> None:
    run = _run(tmp_path).updated(eval={"samples": 2})
    saved(run, steps=0)
    _, first, second, _ = sample_lines(run)
    for line in (first, second):
        assert line.startswith("  ### User: 2 + 2? ### Assistant: -> ")


def test_a_dry_run_shows_what_is_learnt(tmp_path: Path) -> None:
    run = _run(tmp_path)
    words = [f"data.{name}={getattr(run.data, name)}" for name in ("path", "messages_field")]
    words += ["data.chat_template=plain", "data.sequence_length=96", f"run.folder={tmp_path}/run"]
    words += ["data.train_sequences=all", "data.eval_sequences=2"]
    (tmp_path / "run.toml").write_text("[model]\nlayers = 2\nwidth = 16\nheads = 2\ncontext = 96\n")
    sets = [part for word in words for part in ("--set", word)]
    output = printed("train", tmp_path / "run.toml", *sets, "--dry-run", "--show", 2)
    assert output.count("  + 4\\x00\n") + output.count("  + 6\\x00\n") >= 2
    assert "  . ### User:\\n2 + 2?\\n\\n### Assistant:\\n\n" in output
    assert "sample 1: " in output


@pytest.mark.slow
@pytest.mark.dist
def test_the_page_on_chat_models_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of docs/chat.md as they stand, with a small model that learns one answer.

    All but `plan`, which writes nothing on a busy machine.
    """
    page = (Path(__file__).parents[3] / "docs" / "chat.md").read_text(encoding="utf-8")
    block = page.partition("```sh\n")[2].partition("```")[0].splitlines()
    lines = [shlex.split(line, comments=True) for line in block]
    init, look, plan, key, train, generate, export = (w[1:] for w in lines if w[0] == "thinpipe")
    assert plan[0] == "plan"
    monkeypatch.setenv("THINPIPE_KEY_FILE", "run.key")
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 512, "max_position_embeddings": 64, "num_hidden_layers": 4}
    saved_model("llama", tmp_path / "smollm2", **sizes)
    tokenizer_of(STYLES["chatml"], tmp_path / "smollm2")
    asked = generate[generate.index("--prompt") + 1]
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": "Nairobi"}]
    Path("talks.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 120)
    for words in (init, look, key):
        Command(*words).done(code=0)
    other = tmp_path / "host1"
    other.mkdir()
    for name in ("chat.toml", "run.key", "talks.jsonl"):
        shutil.copy(name, other)
    shutil.copytree("smollm2", other / "smollm2")
    here = f"127.0.0.1:{free_port()}"
    train = [here if word == "host0:29500" else word for word in train]
    train += ["--set", "train.lr=0.02", "--set", "train.epochs=6"]
    command = [sys.executable, "-m", "thinpipe.launch", *train]
    machines = [subprocess.Popen(command, cwd=folder) for folder in (tmp_path, other)]
    assert [machine.wait(PATIENCE_S) for machine in machines] == [0, 0]
    (first,) = (one for one in (tmp_path, other) if (one / "runs/chat/config.toml").exists())
    monkeypatch.chdir(first)
    done = Command(*generate, "--temperature", "0").done()
    assert (done.returncode, done.stdout) == (0, "Nairobi\n"), done.stderr
    Command(*export).done(code=0)
    assert Path("my-model", "chat_template.jinja").exists()
