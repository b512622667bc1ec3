"""What a folder says of its tokenizer: how text becomes ids, and which ids end an answer.

Axes: V vocabulary.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from thinpipe.launch.host.packages import explain, first_line

_KNOWN_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "*.tiktoken")
"""Files from which transformers makes what a tokenizer.json would hold."""

_DECIDING = (
    *("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "*.jinja"),
    *("special_tokens_map.json", "generation_config.json", "additional_chat_templates/*.jinja"),
)


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds one that `read_backend` can read."""
    names = {file.name for file in folder.iterdir()}
    known = "tokenizer.json" in names or {"vocab.json", "merges.txt"} <= names
    return known or _to_convert(folder) is not None


def has_chat_template(folder: Path) -> bool:
    """Whether the folder's tokenizer brings a chat template."""
    own = (folder / "chat_template.jinja").is_file()
    return own or "chat_template" in _object(folder / "tokenizer_config.json")


def read_backend(folder: Path) -> Any:
    """The folder's tokenizer as the package tokenizers has it; it truncates and pads nothing.

    Raises:
        ValueError: there is no such folder, no tokenizer in it, or it cannot be read.
        ImportError: the optional package is not installed.
    """
    where = f"data.tokenizer = {str(folder)!r}"
    if not folder.is_dir():
        missing = f"no such folder, seen from {Path.cwd()}"
        found = "a file, not a folder" if folder.is_file() else missing
        raise ValueError(f'{where}: {found}; name one with tokenizer.json, or use "bytes"')
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ImportError(f'{where}: {explain(error)}, or use tokenizer = "bytes"') from error
    if not has_tokenizer(folder):
        raise ValueError(
            f"{where}: holds neither tokenizer.json nor vocab.json with merges.txt; "
            "save the tokenizer there in one of these forms"
        )
    try:
        found = _read(folder, tokenizers)
    except ImportError:
        raise
    except Exception as error:  # the packages raise bare exceptions
        raise ValueError(f"{where}: cannot be read: {error}; save the tokenizer again") from error
    # A tokenizer.json may hold how its model was fed: here it would cut whole texts, in silence.
    found.no_truncation()
    found.no_padding()
    return found


def digest_of_folder(folder: Path) -> str:
    """SHA-256 (hex) of every file that decides a text's tokens, chat templates included."""
    digest = hashlib.sha256()
    names = (*_DECIDING, *_SENTENCEPIECE)
    for file in sorted({file for name in names for file in folder.glob(name)}):
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size} ".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(folder: Path, tokenizers: Any) -> Any:
    whole, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    if whole.is_file():
        return tokenizers.Tokenizer.from_file(str(whole))
    if not (vocab.is_file() and merges.is_file()):
        return _converted(folder)
    model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
    found = tokenizers.Tokenizer(model)
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens([end for end in _KNOWN_ENDS if found.token_to_id(end) is not None])
    return found


def _to_convert(folder: Path) -> Path | None:
    return next((file for name in _SENTENCEPIECE for file in sorted(folder.glob(name))), None)


def _converted(folder: Path) -> Any:
    """A SentencePiece or tiktoken model, converted by transformers."""
    file = _to_convert(folder)
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ImportError(f"{file}: {explain(error)}, or save a tokenizer.json there") from None
    remedy = "save it with transformers' save_pretrained, which writes a tokenizer.json"
    try:
        made = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # many kinds, for missing packages too
        problem = first_line(error)
        raise ValueError(f"{file}: transformers cannot convert it: {problem}; {remedy}") from error
    backend = getattr(made, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{file}: {type(made).__name__} splits text in Python; {remedy}")
    return backend


def without_dummy_space(backend: Any) -> Any:
    """The same tokenizer for text that follows other text: it puts no space of its own before it.

    Metaspace, Prepend and ByteLevel can each add one, and Strip can take one away.
    """
    import tokenizers

    before = json.loads(backend.to_str())
    after = before | {part: _plain(before[part]) for part in ("normalizer", "pre_tokenizer")}
    if after == before:
        return backend
    return tokenizers.Tokenizer.from_str(json.dumps(after, ensure_ascii=False))


def _plain(part: dict[str, Any] | None) -> dict[str, Any] | None:
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        (name,) = (key for key in part if key != "type")
        return {**part, name: [*filter(None, map(_plain, part[name]))]}
    changed: dict[str, dict[str, Any]] = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
        "Strip": {"strip_left": False},
    }
    return {**part, **changed.get(part["type"], {})}


def read_ends(folder: Path, backend: Any) -> tuple[int, ...]:
    """Ids that end a text, the one to write first; none if the folder names none.

    They are the `eos_token` of tokenizer_config.json and all of generation_config.json, else a
    known one of the vocabulary.

    Raises:
        ValueError: one is not in the vocabulary, or a file is not a JSON object.
    """
    found: list[int] = []
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        end = _object(file).get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
        if end is None:
            continue
        number = backend.token_to_id(str(end))
        if number is None:
            raise ValueError(
                f"{file}: eos_token = {str(end)!r}: not in the vocabulary; correct it, or add "
                "the token"
            )
        found.append(number)
        break
    file = folder / "generation_config.json"
    listed = _object(file).get("eos_token_id")
    for number in listed if isinstance(listed, list) else [listed]:
        if number is None:
            continue
        if not isinstance(number, int) or backend.id_to_token(number) is None:
            raise ValueError(f"{file}: eos_token_id = {listed}: {number!r} is no token; correct it")
        found.append(number)
    if not found:
        known = map(backend.token_to_id, _KNOWN_ENDS)
        found = [number for number in known if number is not None][:1]
    return tuple(dict.fromkeys(found))


def _object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())  # as UTF-8, whatever the locale
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON object ({error}); correct or remove it") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: not a JSON object ({type(found).__name__}); correct it")
    return found
