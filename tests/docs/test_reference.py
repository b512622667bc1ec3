"""The generated reference knows every setting there is."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.gradcomp.registry import load_method, method_names
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.launch.cli import all_commands
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.config.sections import TrainConfig
from thinpipe.pipeline.config import GuardConfig

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    folder: Path = tmp_path_factory.mktemp("generated")
    reference.write(folder)
    return folder


@pytest.mark.parametrize("name", ["settings.md", "commands.md"])
def test_pages_in_the_repository_are_those_of_the_code(pages: Path, name: str) -> None:
    kept = (DOCS / "generated" / name).read_text(encoding="utf-8")
    assert kept == (pages / name).read_text(encoding="utf-8"), (
        "run `make docs`, and commit docs/generated"
    )


def described(page: str, model: type[BaseModel], *, but: type[BaseModel] = BaseModel) -> None:
    """Every setting is in the page, as in `rank` (4), with its default first."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, field in model.model_fields.items():
        if name not in but.model_fields:
            default = re.escape(json.dumps(field.default).removesuffix(".0"))
            assert re.search(rf"`{name}` \({default}[;) ]", text), f"{page}: `{name}` ({default})"


@pytest.mark.parametrize("method", method_names())
def test_options_of_methods_are_described_with_their_defaults(method: str) -> None:
    described("data_parallel.md", load_method(method).Config, but=ExchangeOptions)


def test_settings_of_exchanges_shards_and_the_guard_are_described_with_their_defaults() -> None:
    described("data_parallel.md", ExchangeOptions)
    described("activations.md", GuardConfig)
    described("data_parallel.md", ShardsConfig)


def test_every_setting_is_listed(pages: Path) -> None:
    text = (pages / "settings.md").read_text(encoding="utf-8")
    for name, field in RunConfig.model_fields.items():
        assert f"[{name}]" in text
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for key, inner in field.annotation.model_fields.items():
                assert inner.exclude or f"| `{key}` |" in text, f"{name}.{key}"
    assert 'kind = "aqsgd"' in text
    assert "| `bits` | int | `4` | at least `1`, at most `8` |" in text
    assert "[gradcomp.allreduce]" in text


def test_what_is_used_up_in_reading_a_file_is_listed(pages: Path, tmp_path: Path) -> None:
    text = (pages / "settings.md").read_text(encoding="utf-8")
    assert '| `cuts` | tuple of int \\| `"auto"` | `[]` |' in text
    assert "| `stages` | int | one more than `cuts` |" in text
    assert "| `extends` | str | none |" in text
    (tmp_path / "base.toml").write_text(
        '[pipeline]\ncuts = "auto"\nstages = 3\n[train]\nlr = 0.5\n'
    )
    (tmp_path / "run.toml").write_text('extends = "base.toml"\n[train]\nlr = ""\n')
    config = load_config(tmp_path / "run.toml")
    assert (config.pipeline.auto_cuts, config.pipeline.stages) == (True, 3)
    assert config.train.lr == TrainConfig().lr


def test_keys_that_methods_and_kinds_share_are_explained_at_each(pages: Path) -> None:
    sections = (pages / "settings.md").read_text(encoding="utf-8").split("\n## ")
    for key, word, least in (
        ("bucket_mb", "`bucket_mb`: how", 1),
        ("scale_per", "what shares a scale", 2),
    ):
        having = [section for section in sections if f"\n| `{key}` |" in section]
        assert len(having) >= least
        assert all(word in section for section in having)


def test_every_command_and_option_is_listed(pages: Path) -> None:
    text = (pages / "commands.md").read_text(encoding="utf-8")
    known = [name for name, found in all_commands().items() if not hasattr(found, "commands")]
    assert len(known) == 13
    for name in known:
        assert f"## {name}\n" in text
    assert "`thinpipe train RUN.TOML`" in text
    assert "| `--show N` | Local rank that shows progress (-1: none)" in text
    assert "| `--resume` | Resume from the newest checkpoint" in text
    assert "## shaped set\n" in text
    assert "None" not in text  # every option says what it is for


def test_every_page_is_listed_once(pages: Path) -> None:
    guide = (DOCS / "index.md").read_text(encoding="utf-8").splitlines()
    for page in DOCS.glob("*.md"):
        assert guide.count(page.stem) == (page.stem != "index"), page
    for page in pages.glob("*.md"):
        assert f"generated/{page.stem}" in guide
