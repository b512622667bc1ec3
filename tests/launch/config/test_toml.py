"""Files that are read as run files, and files that are rejected with a reason."""

import codecs
import os
from pathlib import Path

import pytest

from thinpipe.launch.config.run import load_config
from thinpipe.launch.config.toml import ConfigError, files_of, read_text

GOOD = '[run]\nname = "u"  # für alle\n'


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(mark + GOOD.encode())
    assert read_text(path) == GOOD
    assert load_config(path).run.name == "u"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD.encode("utf-16"), "UTF-16, as some editors and PowerShell's > write; save it as UTF"),
        (codecs.BOM_UTF16_BE + GOOD.encode("utf-16-be"), "iconv -f UTF-16 -t UTF-8"),
        (b"[run]\n\xff\xfe", "not UTF-8 text (line 2); name a run file, or save it as UTF-8"),
        (b"\0" * (17 << 20), "has 18 MB, more than any run file"),
        (b"[run\n", "cannot be read as TOML: "),
        (b"extends = 3\n", "extends = 3: give the name of a file, in quotes"),
    ],
)
def test_other_files_are_rejected_by_what_they_are(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as rejected:
        load_config(path)
    assert str(rejected.value).startswith(f"{path}: ")
    assert message in str(rejected.value)


@pytest.mark.timeout(30)
def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="a device or a pipe; name a file"):
            load_config(path)
    with pytest.raises(ConfigError, match="a folder; name the run file"):
        load_config(tmp_path)


def test_links_without_a_target_and_files_without_permission_are_named(tmp_path: Path) -> None:
    dangling, loop = tmp_path / "dangling", tmp_path / "loop"
    dangling.symlink_to("nowhere.toml")
    loop.symlink_to("loop")
    with pytest.raises(ConfigError, match=r"dangling: a link to nowhere.toml, which does not ex"):
        load_config(dangling)
    with pytest.raises(ConfigError, match=r"loop: cannot be read \(Too many levels of symbolic"):
        load_config(loop)
    if os.geteuid():  # root may read anything
        dangling.unlink()
        dangling.write_text(GOOD)
        dangling.chmod(0)
        with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\); correct its"):
            load_config(dangling)


def test_a_program_is_none(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import thinpipe\n")
    with pytest.raises(ConfigError, match=r"mine.py: a program; use `thinpipe run .*mine.py`"):
        load_config(tmp_path / "mine.py")


def test_files_of_a_run_are_all_that_it_extends(tmp_path: Path) -> None:
    for name, text in (("a", 'extends = "b.toml"'), ("b", 'extends = "c.toml"'), ("c", "")):
        (tmp_path / f"{name}.toml").write_text(text)
    assert [path.name for path in files_of(tmp_path / "a.toml")] == ["a.toml", "b.toml", "c.toml"]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[train]\nepochs = true", "train.epochs = true"),
        ("[train]\nweight_decay = false", "train.weight_decay = false"),
        ("[train]\nbetas = [0.9, false]", "train.betas.1 = false"),
        ("[pipeline]\ncuts = [true]", "pipeline.cuts.0 = true"),
        (
            '[[boundary]]\nforward = { kind = "aqsgd", bits = true }',
            "boundary.0.forward.bits = true",
        ),
        ("[gradcomp]\npowersgd = { rank = true }", "gradcomp.powersgd.rank = true"),
        ("[train]\nepochs = '8'", 'train.epochs = "8"'),
        ("[train]\nlr = '1e-3'", 'train.lr = "1e-3"'),
        ("[gradcomp]\npowersgd = { rank = '4' }", 'gradcomp.powersgd.rank = "4"'),
    ],
)
def test_neither_flags_nor_texts_are_numbers(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=f"{where}: give a number"):
        load_config(path)
    path.write_text("[network]\ntrusted = true\n")
    assert load_config(path).network.trusted


def test_a_key_outside_its_section_is_told_where_it_belongs(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("epochs = 3\n")
    with pytest.raises(ConfigError, match=r"epochs: unknown key; it belongs under \[train\]"):
        load_config(path)
