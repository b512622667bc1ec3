"""An unknown key is answered with the keys of its own table, everywhere in the schema."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import pytest
import tomlkit
from pydantic import BaseModel

from thinpipe.gradcomp.registry import load_method, method_names
from thinpipe.launch.config.errors import written_keys
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.config.toml import ConfigError, load_as
from thinpipe.launch.net.ssh.hosts import HostsConfig
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.own.config import OwnModelConfig


class Table(NamedTuple):
    """A table of a file: its dotted name, its model, and what makes it and those above this one."""

    name: str
    model: type[BaseModel]
    given: Sequence[Mapping[str, Any]] = ()


_GIVEN: Mapping[type[BaseModel], Mapping[str, Any]] = {
    HuggingFaceConfig: {"config": "folder"},
    OwnModelConfig: {"factory": "module:function"},
}


def tables(
    model: type[BaseModel], name: str = "", above: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Table]:
    """All tables of a file, each as often as there are models that it may be."""
    kind = model.model_fields.get("kind")
    given = (*above, _GIVEN.get(model, {"kind": kind.default} if kind else {}))
    yield Table(name, model, given)
    for key, field in model.model_fields.items():
        if not field.exclude:
            listed = [{}] if get_origin(field.annotation) is tuple else []
            place = f"{name}.{key}{'.0' if listed else ''}".lstrip(".")
            for inner in models(field.annotation):
                yield from tables(inner, place, (*given, *listed))


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models(part)


RUN_TABLES = [
    *tables(RunConfig),
    *(Table(f"gradcomp.{name}", load_method(name).Config, [{}, {}, {}]) for name in method_names()),
]
IDS = [f"{table.name}-{table.model.__name__}" for table in RUN_TABLES]


def answer(folder: Path, table: Table, key: str, *more: str, root: type[BaseModel]) -> str:
    """What a file is answered that has an unknown key in a table."""
    tree: Any = {**table.given[-1], key: 1}
    parts = table.name.split(".") if table.name else []
    for part, given in zip(reversed(parts), reversed(table.given[:-1]), strict=True):
        tree = [tree] if part == "0" else {**given, part: tree}
    path = folder / "file.toml"
    path.write_text(tomlkit.dumps(tree))
    with pytest.raises(ConfigError) as caught:
        load_config(path, more) if root is RunConfig else load_as(root, path)
    where = f"{table.name}.{key}".lstrip(".")
    (line,) = (line for line in str(caught.value).splitlines() if f": {where}: " in line)
    return line.partition(f"{where}: unknown key; ")[2]


def test_the_schema_was_walked() -> None:
    """Every section and both unions, to the bottom."""
    found = set(IDS)
    assert {"-RunConfig", "model.lora-LoraConfig", "boundary.0.guard-GuardConfig"} <= found
    assert {"data.sources.0-SourceConfig", "boundary.0.backward-GradientAqsgdConfig"} <= found
    assert {"model-OwnModelConfig", "gradcomp.demo-Config"} <= found
    assert len(RUN_TABLES) >= 40


@pytest.mark.parametrize("table", RUN_TABLES, ids=IDS)
def test_each_misspelt_key_is_answered_with_the_key(tmp_path: Path, table: Table) -> None:
    keys = written_keys(table.model)
    for key in keys:
        assert answer(tmp_path, table, f"{key}x", root=RunConfig) == f'did you mean "{key}"?'
    if keys:
        known = answer(tmp_path, table, "qqq", root=RunConfig)
        assert sorted(known.removeprefix("known here: ").split(", ")) == sorted(keys)


@pytest.mark.parametrize("table", [*tables(HostsConfig)], ids=lambda table: table.model.__name__)
def test_a_hosts_file_is_answered_alike(tmp_path: Path, table: Table) -> None:
    for key in written_keys(table.model):
        assert answer(tmp_path, table, f"{key}x", root=HostsConfig) == f'did you mean "{key}"?'


@pytest.mark.parametrize("more", [[], ["data.tokenizer=model"]])
def test_a_tokenizer_of_the_model_hides_no_key(tmp_path: Path, more: list[str]) -> None:
    table = Table("model", HuggingFaceConfig, [{}, {"config": "folder"}])
    assert answer(tmp_path, table, "dropuot", *more, root=RunConfig) == 'did you mean "dropout"?'
    path = tmp_path / "file.toml"
    path.write_text('[model]\nconfig = "folder"\nlora = { rank = 0 }')
    with pytest.raises(ConfigError, match=r"model\.lora\.rank = 0: use 1 or more"):
        load_config(path, more)


def test_a_key_of_another_section_is_sent_there(tmp_path: Path) -> None:
    top, train = Table("", RunConfig, [{}]), RunConfig.model_fields["train"].annotation
    assert train is not None
    section = Table("train", train, [{}, {}])
    assert answer(tmp_path, top, "lr", root=RunConfig) == "it belongs under [train]"
    assert answer(tmp_path, top, "rank", root=RunConfig) == 'did you mean "ranks" under [pipeline]?'
    assert answer(tmp_path, section, "width", root=RunConfig) == "it belongs under [model]"
