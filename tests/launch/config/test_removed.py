"""Settings that are gone: ignored where they say what holds anyway, else rejected by name."""

from pathlib import Path
from typing import Any

import pytest
import tomlkit

from thinpipe.launch.config.diff import changed_settings
from thinpipe.launch.config.removed import _GONE, _GONE_VALUES
from thinpipe.launch.config.run import RunConfig, load_config, load_run
from thinpipe.launch.config.toml import ConfigError

PLACES = {
    "boundary.*.*ward*.coding": "boundary.0.backward.coding",
    "boundary.*.*ward*.tile": "boundary.0.forward.first_visit.tile",
    "boundary.*.forward.kind": "boundary.0.forward.kind",
    "gradcomp.*.local_steps": "gradcomp.cocktail.local_steps",
}
"""Names in a file for patterns that the rules below do not fill."""


def place(pattern: str) -> str:
    filled = pattern.replace("*ward", "backward").replace("boundary.*", "boundary.0")
    return PLACES.get(pattern, filled.replace("gradcomp.*", "gradcomp.cocktail"))


def tree(name: str, value: Any) -> dict[str, Any]:
    """A file with that setting alone; kinds that have had it."""
    *sections, key = name.split(".")
    found: dict[str, Any] = {key: value}
    if "ward" in name and key != "kind":
        found = {"kind": "transform" if key in ("of", "error") else "direct", **found}
    if key == "tile":
        found, sections = {"kind": "aqsgd", "first_visit": {key: value}}, sections[:-1]
    for section in reversed(sections):
        found = {section: found} if section != "0" else {"": found}
    if "boundary" in found:
        found["boundary"] = [found["boundary"][""]]
    return found


def read(folder: Path, name: str, value: Any) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(tomlkit.dumps(tree(name, value)))
    return load_config(path)


@pytest.mark.parametrize(("pattern", "still", "remedy"), _GONE)
def test_a_saved_run_that_says_what_holds_is_read(
    tmp_path: Path, pattern: str, still: Any, remedy: str
) -> None:
    name = place(pattern)
    if still is not None:  # which a file cannot say
        read(tmp_path, name, still)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, name, 7)
    assert f"{name} = 7: no longer a setting; {remedy}" in str(caught.value)


@pytest.mark.parametrize(("pattern", "value", "remedy"), _GONE_VALUES)
def test_a_value_that_is_gone_is_answered_with_what_to_use(
    tmp_path: Path, pattern: str, value: str, remedy: str
) -> None:
    name = place(pattern)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, name, value)
    assert f'{name} = "{value}": no longer offered; {remedy}' in str(caught.value)


def sending(forward: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of a run with that direction of a cut."""
    now = RunConfig.model_validate({"pipeline": {"cuts": [2]}}).shared()
    return {**now, "boundary": [{"forward": forward}]}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"coding": "zstd"}, {}),
        ({"coding": "zstd", "rate": None}, {}),
        ({"coding": "rans"}, {"delta": "uniform"}),
    ],
)
def test_a_checkpoint_of_coded_messages_is_of_a_run_that_sends_the_same_values(
    before: dict[str, Any], now: dict[str, Any]
) -> None:
    saved, this = (sending({"kind": "aqsgd", "bits": 4, **each}) for each in (before, now))
    assert changed_settings(saved, this) == []


def test_a_checkpoint_with_a_rate_is_rejected_by_name() -> None:
    saved = sending({"kind": "aqsgd", "bits": 4, "rate": 0.6, "coding": "zstd"})
    with pytest.raises(
        ValueError, match=r"boundary.0.forward.rate = 0.6: no longer a setting; use"
    ):
        changed_settings(saved, sending({"kind": "aqsgd", "bits": 2}))


@pytest.mark.parametrize(
    "gone",
    [
        {"boundary": [{"forward": {"kind": "aqsgd", "coding": "rans"}}]},
        {"boundary": [{"backward": {"kind": "direct", "bits": 4, "rate": 0.5, "coding": "zstd"}}]},
        {"memory": {"tier": "pinned"}},
        {"gradcomp": {"method": "ef_updates", "ef_updates": {"bits": 1}}},
        {"gradcomp": {"method": "demo", "demo": {"look_ahead": True}}},
    ],
)
def test_weights_of_a_run_with_what_is_gone_can_be_used(
    tmp_path: Path, gone: dict[str, Any]
) -> None:
    (tmp_path / "config.toml").write_text(tomlkit.dumps(gone), encoding="utf-8")
    load_run(tmp_path)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "config.toml")


def test_a_checkpoint_that_says_what_holds_is_of_the_same_run() -> None:
    now = RunConfig().shared()
    saved = {**now, "train": {**now["train"], "verify_share": 0.008}}
    assert changed_settings(saved, now) == []


def test_all_that_is_gone_is_answered_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[train]\nverify_share = 0.5\n[[boundary]]\n"
        'forward = { kind = "auto", coding = "auto" }\n[gradcomp.cocktail]\nseed = 3\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    said = [line.strip() for line in str(caught.value).splitlines()]
    names = ("train.verify_share = 0.5", 'boundary.0.forward.kind = "auto"')
    names = (*names, 'boundary.0.forward.coding = "auto"', "gradcomp.cocktail.seed = 3")
    assert all(any(name in line for line in said) for name in names), said
