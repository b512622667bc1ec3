"""Text that a trained language model writes.

Axes: T tokens, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.config.run import RunConfig, load_run
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.trained.model import Step, load
from thinpipe.pipeline.batch import IGNORED_TARGET

if TYPE_CHECKING:
    from thinpipe.launch.data.tokenizer import Tokenizer

_CONTEXT_TOKENS = 16  # decoded again with each token, so not the whole text
_SHOWN_TOKENS = 48  # of a sample at the end of a run
_MOST_PARAMETERS = 50e6  # of a model that is sampled unasked: reading and running takes seconds


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: `temperature` 0 takes the likeliest; `top_k` 0 draws from all."""

    tokens: int = 64
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0


def generate(
    run_folder: Path, prompt: str, sampling: Sampling, *, step: Step = None
) -> Iterator[str]:
    """Yield the text that follows the prompt, piece by piece.

    Raises:
        ConfigError, CheckpointError: there is no language model of text in the folder.
    """
    config, tokenizer = _read(run_folder)
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ConfigError(f"--prompt = {prompt!r}: holds no token; write a word")
    model = load(run_folder, step=step)
    writer = _Writer(config, model, tokenizer, frozenset(tokenizer.ends))
    yield from writer.write(tokenizer.begun(ids), sampling)


class Conversation:
    """Questions and answers, written out by the chat template that the run trained with."""

    def __init__(self, run_folder: Path, *, step: int | None = None) -> None:
        """Load the model.

        Raises:
            ConfigError, CheckpointError: there is no language model of text in the folder.
            ValueError: there is no chat template.
        """
        from thinpipe.launch.data.chat.encoder import answer_ends
        from thinpipe.launch.data.chat.template import load_template

        config, self._tokenizer = _read(run_folder)
        data = config.data
        if data.kind == "instructions" and not (data.messages_field or data.chat_template):
            raise ConfigError(
                f"--chat: {run_folder} was trained on prompts without a chat template; use "
                "--prompt, and end it as its prompts do"
            )
        self._template = load_template(data.chat_template, self._tokenizer)
        ends = answer_ends(self._template, self._tokenizer)
        self._writer = _Writer(config, load(run_folder, step=step), self._tokenizer, ends)
        self._messages: list[dict[str, str]] = []

    def answer(self, question: str, sampling: Sampling) -> Iterator[str]:
        """Yield the answer to one more question, piece by piece.

        Raises:
            ValueError: the template does not take the conversation.
        """
        self._messages.append({"role": "user", "content": question})
        asked = self._tokenizer.encode(self._template.render(self._messages, prompt=True))
        said = ""
        for piece in self._writer.write(self._tokenizer.begun(asked), sampling):
            said += piece
            yield piece
        self._messages.append({"role": "assistant", "content": said})


def _read(run_folder: Path) -> "tuple[RunConfig, Tokenizer]":
    config = load_run(run_folder)
    problem = _no_text(config)
    if problem is not None:
        raise ConfigError(f"{run_folder}: {problem}")
    return config, _tokenizer_of(config)


def sample_lines(config: RunConfig) -> list[str]:
    """Lines for the end of a run: texts that its model writes, if `eval.samples` asks for some.

    A run whose checkpoint is not wholly on this machine, or whose model writes no text, has none.
    """
    if config.eval.samples == 0:
        return []
    problem = _no_text(config)
    if problem is not None:
        return [f"note: eval.samples = {config.eval.samples}: {problem}"]
    folder = config.run.path
    try:
        model = load(folder)
    except CheckpointError:  # parts are on other machines
        return []
    if sum(p.numel() for p in model.parameters()) > _MOST_PARAMETERS:
        return [f'note: a large model writes with: thinpipe generate {folder} --prompt "..."']
    tokenizer = _tokenizer_of(config)
    ends = frozenset(tokenizer.ends)
    if config.data.messages_field or config.data.chat_template:
        from thinpipe.launch.data.chat.encoder import answer_ends
        from thinpipe.launch.data.chat.template import load_template

        ends = answer_ends(load_template(config.data.chat_template, tokenizer), tokenizer)
    writer, lines = _Writer(config, model, tokenizer, ends), ["what it writes now:"]
    prompts = _prompts(config) or [tokenizer.begun(tokenizer.encode("\n"))]
    for seed in range(config.eval.samples):
        asked = prompts[seed % len(prompts)]
        text = "".join(writer.write(asked, Sampling(_SHOWN_TOKENS, seed=seed)))
        question = " ".join(tokenizer.decode(asked[-_SHOWN_TOKENS:]).split())
        shown = " ".join(text.split())
        lines.append(f"  {question} -> {shown}" if question else f"  {shown}")
    return [*lines, f'  more: thinpipe generate {folder} --prompt "..."']


def _prompts(config: RunConfig) -> list[list[int]]:
    """Tokens of held-out examples up to the first that is learnt; none for running text."""
    from thinpipe.launch.corpus import check_data

    if config.data.kind != "instructions":
        return []
    evaluation = check_data(config).evaluation
    batch = evaluation.batch(range(min(config.eval.samples, len(evaluation))))
    found = []
    for ids, targets in zip(batch.inputs_BT, batch.targets, strict=True):
        first = int((targets != IGNORED_TARGET).int().argmax())
        found.append(ids[: first + 1].tolist())
    return found


def _no_text(config: RunConfig) -> str | None:
    if config.model.task != "language":
        return "its model classifies texts, and writes none"
    if config.model.is_own and getattr(config.data, "factory", None):
        return "its samples are not made of text by a tokenizer; use load() and sample by hand"
    return None


def _tokenizer_of(config: RunConfig) -> "Tokenizer":
    from thinpipe.launch.data.tokenizer import load_tokenizer

    return load_tokenizer(config.data.tokenizer)


class _Writer:
    def __init__(
        self, config: RunConfig, model: nn.Module, tokenizer: "Tokenizer", ends: frozenset[int]
    ) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._holes = torch.tensor(tokenizer.holes, dtype=torch.int64)
        context = config.model.longest_text(config.data.sequence_length)
        self._predict: Callable[[list[int]], Tensor] = partial(_predict, model, context)
        if config.model.caches_keys:
            self._predict = _Cached(model, context)

    @torch.no_grad()
    def write(self, ids: list[int], sampling: Sampling) -> Iterator[str]:
        """Yield the text after `ids`, whole characters at a time."""
        generator = torch.Generator().manual_seed(sampling.seed)
        tokenizer = self._tokenizer
        # decoded with some of what comes before: the space that begins a text is dropped
        before = ids[-_CONTEXT_TOKENS:]
        written: list[int] = []
        shown = tokenizer.decode(before)
        for _ in range(sampling.tokens):
            logits_V = self._predict([*ids, *written])[: tokenizer.vocab]
            logits_V[self._holes] = -torch.inf
            token = _draw(logits_V, sampling, generator)
            if token in self._ends:
                break
            written.append(token)
            text = tokenizer.decode([*before, *written])
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is incomplete
                yield text[len(shown) :]
                shown = text


def _predict(model: nn.Module, context: int, ids: list[int]) -> Tensor:
    logits_V: Tensor = model(torch.tensor([ids[-context:]]))[0, -1]
    return logits_V


class _Cached:
    """Predictions of a model of the library transformers, which keeps keys and values."""

    def __init__(self, model: Any, context: int) -> None:
        self._model, self._context = model, context
        self._seen: list[int] = []
        self._cache: Any = None
        # transformers 5.24 renames the argument, and the field of what is returned
        named = "cache" in inspect.signature(model.forward).parameters
        self._name = "cache" if named else "past_key_values"

    def __call__(self, ids: list[int]) -> Tensor:
        if len(ids) > self._context:  # positions move: a cache would be of other ones
            out = self._model(input_ids=torch.tensor([ids[-self._context :]]), use_cache=False)
        else:
            follows = self._cache is not None and ids[: len(self._seen)] == self._seen
            new = ids[len(self._seen) :] if follows else ids
            cache = {self._name: self._cache if follows else None}
            out = self._model(input_ids=torch.tensor([new]), use_cache=True, **cache)
            self._cache, self._seen = getattr(out, self._name, None), list(ids)
        logits_V: Tensor = out.logits[0, -1]
        return logits_V


def _draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scores_V = logits_V.float() / sampling.temperature
    if 0 < sampling.top_k < len(scores_V):
        least = scores_V.topk(sampling.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < least, -torch.inf)
    return int(torch.multinomial(scores_V.softmax(0), 1, generator=generator))
