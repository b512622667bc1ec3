"""Export of a run to a Hugging Face folder that `from_pretrained` reads.

Tensors go back to the names, files and dtypes that they were read from, so the
export of a run without training steps equals its source byte for byte.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from thinpipe.launch.checkpoint.run_folder import check_folder
from thinpipe.launch.config.run import load_run
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.chat.template import OWN, template_text
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.tokenizer import BYTES
from thinpipe.launch.trained.model import read_trained
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.layouts import Layout
from thinpipe.pipeline.models.hf.shards import write_shards
from thinpipe.pipeline.models.hf.weights import Sources, tied_names
from thinpipe.pipeline.models.paths import user_path

ExportDtype = Literal["source", "fp32", "bf16"]
ExportFormat = Literal["hf", "peft", "safetensors"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SHARD_NBYTES = 4 * 10**9  # a larger tensor has a file of its own
_SETTINGS = ("generation_config.json", "LICENSE*")
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("vocab*", "merges.txt", "encoder.json", "tekken.json"),
    *("chat_template*", "additional_chat_templates"),
)


def export(run_folder: Path, out: Path, *, step: int | None, dtype: ExportDtype) -> list[str]:
    """Write the model of a checkpoint, by default the newest, to the folder `out`; return notes.

    The checkpoint may be of any number of stages and replicas, but all its parts must be here.
    LoRA is merged. `dtype = "source"` is that of the weights the run started from.

    Raises:
        ConfigError: the run is not of a Hugging Face model, `out` is not empty, or a weight
            overflows `dtype`.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    check_folders(run_folder, out)
    config = load_run(run_folder)
    model = config.model
    if not isinstance(model, HuggingFaceConfig):
        raise ConfigError(
            f"{run_folder}: the library transformers has no class for the model of this run; "
            "export its weights with --format safetensors"
        )
    with new_folder(out) as folder:
        trained = read_trained(run_folder, step=step)
        notes = [f"step {trained.step} of {run_folder}"]
        tensors, labels = trained.state_dict(), config.data.labels
        notes += WholeModel(model, tensors, dtype, labels).write(folder)
        notes += _copy_tokenizer(model.folder, config.data.tokenizer, folder)
        notes += _write_template(config.data, folder)
    return notes


def check_folders(run_folder: Path, out: Path) -> None:
    """Check that both may be folders."""
    for name, folder in (("RUN_FOLDER", run_folder), ("OUT", out)):
        check_folder(folder, name)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name `out` at the end and is removed if that fails.

    Raises:
        ConfigError: `out` holds something.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: exists and is not empty; name a new folder")
    out = out.resolve()  # "." has no name, and a link is not to be replaced
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists():
        out.rmdir()
    partial.rename(out)


def _copy_tokenizer(source: Path, tokenizer: str, folder: Path) -> list[str]:
    """Copy the files that belong to text: the source's, or those of the tokenizer in use."""
    used = source if tokenizer == BYTES else user_path(tokenizer).resolve()
    for place, patterns in ((source, _SETTINGS), (used, _TOKENIZER)):
        for found in sorted({path for pattern in patterns for path in place.glob(pattern)}):
            if found.is_dir():
                shutil.copytree(found, folder / found.name, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(found, folder / found.name)
    if tokenizer == BYTES:
        return ['data.tokenizer = "bytes": the tokenizer is the source\'s, which was not used']
    return [] if used == source.resolve() else [f"the tokenizer is that of {used}"]


def _write_template(data: DataConfig, folder: Path) -> list[str]:
    """In place of the tokenizer's own chat templates, the one that the run file names."""
    if data.chat_template in (None, OWN) or data.tokenizer == BYTES:
        return []
    source = template_text(data.chat_template)
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    for found in folder.glob("chat_template*"):
        found.unlink()
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    facts = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    if "chat_template" in facts:  # older programs read it there
        text = json.dumps({**facts, "chat_template": source}, indent=2, ensure_ascii=False)
        settings.write_text(text + "\n", encoding="utf-8")
    return [f'the chat template is data.chat_template = "{data.chat_template}"']


class WholeModel:
    """A model to write, by the names of its parameters; `labels` are names of its classes."""

    def __init__(
        self,
        model: HuggingFaceConfig,
        tensors: Mapping[str, Tensor],
        dtype: ExportDtype,
        labels: Sequence[str] | None = None,
    ) -> None:
        self._model, self._tensors, self._dtype, self._labels = model, tensors, dtype, labels
        self._whole = model.whole()
        self._on_disk: dict[str, str] = {}
        self._layouts: list[Layout] = []
        self._files: dict[str, str] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        if model.weight_files is not None:
            sources = Sources(model.weight_files, self._whole, model.family)
            self._on_disk, self._layouts = sources.on_disk, sources.layouts
            self._files = model.weight_files.files
            converted = [name for layout in self._layouts for name in layout.stored]
            self._dtypes = model.weight_files.dtypes([*self._on_disk.values(), *converted])

    def write(self, folder: Path) -> list[str]:
        """Write everything to an empty folder; return notes on deviations from the source."""
        untied = self._untied()
        tied = self._tied(untied)
        stored = self._stored([name for name in self._whole.state_dict() if name not in tied])
        write_shards(folder, stored, self._file_names(stored))
        self._write_config(folder, stored, untied=bool(untied))
        notes = [f"{name}: one weight with {kept}, saved once" for name, kept in tied.items()]
        if untied:
            notes.append(f"{', '.join(untied)}: differs from the embedding, so saved untied")
        unused = self._files.keys() - stored.keys()
        if unused:
            notes.append(f"not part of this model, left out: {', '.join(sorted(unused)[:4])}")
        return notes

    def _untied(self) -> list[str]:
        """What config.json ties to a parameter that is no longer equal, or never was."""
        return self._model.own_heads + [
            name
            for name, source in tied_names(self._whole).items()
            if not torch.equal(self._tensors[name], self._tensors[source])
        ]

    def _tied(self, untied: Sequence[str]) -> dict[str, str]:
        """Parameters that are left out, and the equal ones that files hold in their place."""
        found = {}
        for name, source in tied_names(self._whole).items():
            if name not in untied and not {name, source} <= self._on_disk.keys():
                left_out, kept = (source, name) if name in self._on_disk else (name, source)
                found[left_out] = kept
        return found

    def _stored(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors by their names on disk, in the layout of the source."""
        stored = {
            self._on_disk[name]: self._cast(self._tensors[name], name, self._on_disk[name])
            for name in names
            if name in self._on_disk
        }
        placed = set(self._on_disk)
        for layout in self._layouts:
            for disk, tensor in layout.to_disk(self._tensors, self._whole).items():
                stored[disk] = self._cast(tensor, disk, disk)
            placed |= set(layout.produces)
        new = {name: self._tensors[name] for name in names if name not in placed}
        if new:
            from transformers.core_model_loading import revert_weight_conversion

            copies = tied_names(self._whole)
            copies |= {source: name for name, source in copies.items()}
            found = {name: self._cast(t, name, copies.get(name, name)) for name, t in new.items()}
            stored |= revert_weight_conversion(self._whole, found)
        return stored

    def _cast(self, tensor: Tensor, name: str, source: str) -> Tensor:
        """In the dtype to write; `source` is a name on disk or of a parameter with one."""
        if not tensor.is_floating_point():
            return tensor
        if self._dtype != "source":
            return fitting(tensor, DTYPES[self._dtype], name)
        found = self._dtypes.get(source) or self._dtypes.get(self._on_disk.get(source, ""))
        return fitting(tensor, found or tensor.dtype, name)

    def _file_names(self, stored: Mapping[str, Tensor]) -> dict[str, str]:
        """The file of each tensor as in the source; new tensors, such as a head, go to the last."""
        if self._files:
            last = max(self._files.values())
            return {name: self._files.get(name, last) for name in stored}
        from huggingface_hub import split_torch_state_dict_into_shards

        split = split_torch_state_dict_into_shards(dict(stored), max_shard_size=_SHARD_NBYTES)
        return split.tensor_to_filename

    def _write_config(self, folder: Path, stored: Mapping[str, Tensor], *, untied: bool) -> None:
        """The source's config.json, changed only where it no longer applies."""
        source = (self._model.folder / "config.json").read_text(encoding="utf-8")
        facts = json.loads(source)
        changes: dict[str, Any] = {"tie_word_embeddings": False} if untied else {}
        if self._model.task == "classification":
            config = self._model.transformers_config
            names = dict(enumerate(self._labels)) if self._labels else config.id2label
            numbers = {name: number for number, name in names.items()}
            changes |= {"id2label": names, "label2id": numbers}
            changes |= {"architectures": [type(self._whole).__name__]}
            if self._model.problem != (facts.get("problem_type") or "single_label_classification"):
                changes |= {"problem_type": self._model.problem}
        floats = {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()}
        dtypes = [str(dtype).removeprefix("torch.") for dtype in floats]
        for key in ("dtype", "torch_dtype"):
            if len(dtypes) == 1 and facts.get(key) not in (None, *dtypes):
                changes[key] = dtypes[0]
        changes = json.loads(json.dumps(changes))  # keys as the file has them
        same = all(facts.get(key) == value for key, value in changes.items())
        text = source if same else json.dumps({**facts, **changes}, indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")


def fitting(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in another dtype.

    Raises:
        ConfigError: a value is too large for it.
    """
    cast = tensor.to(dtype)
    if bool(tensor.isfinite().all()) and not bool(cast.isfinite().all()):
        raise ConfigError(
            f"{name}: holds {float(tensor.abs().max()):.4g}, more than {dtype} can represent; "
            "export with --dtype bf16 or fp32"
        )
    return cast
