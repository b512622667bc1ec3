"""Which encoder turns a run's rows into documents, and which marks stand between texts."""

import hashlib
import json
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from thinpipe.launch.data.chat.encoder import ChatEncoder, encode_prompt
from thinpipe.launch.data.chat.template import template_text
from thinpipe.launch.data.classification import LabelledEncoder, Labelling
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.documents import Column, Encoder
from thinpipe.launch.data.tokenizer import BYTES, FolderTokenizer, Tokenizer
from thinpipe.launch.data.tokenizer_files import digest_of_folder

_VERSION = 2  # raised when the same rows and settings give other tokens
Marks = Literal["tokenizer", "end", "none"]


def document_marks(tokenizer: Tokenizer, marks: Marks) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens before and after a document.

    A byte tokenizer has none of its own, and one without an end mark writes none.
    """
    if marks == "none" or (marks == "tokenizer" and not isinstance(tokenizer, FolderTokenizer)):
        return (), ()
    if marks == "end":
        return (), (tokenizer.end,)
    return tokenizer.begin, tokenizer.ends[:1]


def describe_marks(tokenizer: Tokenizer, marks: Marks) -> str:
    """What stands between documents, in words."""
    begin, finish = document_marks(tokenizer, marks)
    if not begin and not finish:
        return "documents follow each other without marks"
    shown = [repr(tokenizer.decode([i], special=True)) for i in (*finish, *begin)]
    return f"{' and '.join(shown)} between documents"


def encoder_for(
    config: DataConfig, tokenizer: Tokenizer, labelling: Labelling | None = None
) -> Encoder:
    """The encoder of a run's prompts, conversations or labelled texts."""
    labelling = labelling or Labelling()
    key = _key(config, tokenizer, labelling)
    columns: tuple[Column, ...]
    if config.kind == "labelled":
        columns = ("targets", "types") if labelling.types > 1 else ("targets",)
        labelled = LabelledEncoder(config, tokenizer, labelling)
        return Encoder(key, tokenizer.vocab, columns, labelled.encode)
    columns = () if config.loss_on == "all" else ("counts",)
    _ = tokenizer.end  # else every row would be told that there is none
    is_plain = config.messages_field is None and config.chat_template is None
    prompts = partial(encode_prompt, config=config, tokenizer=tokenizer)
    encode = prompts if is_plain else ChatEncoder(config, tokenizer).encode
    return Encoder(key, tokenizer.vocab, columns, encode)


def _key(config: DataConfig, tokenizer: Tokenizer, labelling: Labelling) -> str:
    names: tuple[str, ...] = ("prompt_field", "response_field", "messages_field", "loss_on")
    if config.kind == "labelled":
        names = ("text_field", "pair_field", "label_field", "labels")
    folder = tokenizer.folder if isinstance(tokenizer, FolderTokenizer) else None
    parts: dict[str, Any] = {
        "version": _VERSION,
        "tokenizer": BYTES if folder is None else digest_of_folder(folder),
        "packages": [_installed(name) for name in ("tokenizers", "transformers")],
        "fields": {name: getattr(config, name) for name in names},
        "room": config.sequence_length,
    }
    if config.kind == "labelled":
        parts["labelling"] = asdict(labelling)
    elif config.chat_template or config.messages_field is not None:
        parts["template"] = template_text(config.chat_template)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
