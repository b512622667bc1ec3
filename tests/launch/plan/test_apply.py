"""A run file is edited in place, and stays what its owner wrote."""

import tomllib
from pathlib import Path

import pytest

from thinpipe.launch.config.run import load_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.plan import apply
from thinpipe.launch.plan.apply import apply_plan

TABLES = [
    {"cut": 2, "forward": {"kind": "aqsgd", "bits": 3}, "backward": {"kind": "raw"}},
    {"cut": 5, "forward": {"kind": "raw", "format": "bf16"}, "backward": {"kind": "raw"}},
]

OLD = "# comments of the previous boundaries:"


def applied(tmp_path: Path, text: str, tables: list[dict[str, object]] | None = TABLES) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text)
    apply_plan(path, (2, 5), tables)
    config = load_config(path)
    assert config.pipeline.cuts == (2, 5)
    assert not config.pipeline.auto_cuts
    if tables is not None:
        assert config.boundary_at(2).forward.bits == 3
        assert config.boundary_at(5).forward.kind == "raw"
    return path.read_text(encoding="utf-8")


def test_comments_and_order_stay(tmp_path: Path) -> None:
    text = """# my run
[pipeline]
cuts = "auto"   # found by "plan"
stages = 3  # that's all hosts
schedule = "GPipe"  # simple

[[boundary]]    # all links
# two slow ones
forward = { kind = "aqsgd", bits = 4 }
[boundary.backward]
kind = "direct"  # "simple" and small

# how
[train]         # the rest
lr = 1e-3
"""
    edited = applied(tmp_path, text)
    assert edited.startswith(
        '# my run\n[pipeline]\ncuts = [2, 5] # found by "plan"  # that\'s all hosts\nschedule'
    )
    assert f'[[boundary]]\n{OLD}\n# all links\n# two slow ones\n# "simple" and' in edited
    assert edited.endswith("\n\n# how\n[train]         # the rest\nlr = 1e-3\n")
    assert edited.count("#") == text.count("#") + 1


def test_comments_of_replaced_boundaries_are_kept_under_a_heading(tmp_path: Path) -> None:
    text = """# my run

# coded
[[boundary]]
forward = { kind = "aqsgd", bits = 4 }

# the fast one
[[boundary]]
cut = 4   # tiles
# or fewer bits

# how
[train]
lr = 1e-3
"""
    edited = applied(tmp_path, text)
    head = f"[[boundary]]\n{OLD}\n# the fast one\n# tiles\ncut = 2\n"
    assert edited.startswith(f"# my run\n\n# coded\n{head}")
    assert "# or fewer bits\n\n# how\n[train]\nlr = 1e-3\n" in edited
    assert applied(tmp_path, edited) == edited


def test_comments_in_a_list_that_is_replaced_stay(tmp_path: Path) -> None:
    text = '[pipeline]\ncuts = [  # both\n  1,  # it\'s "fast" [\n  2,\n]\nmicrobatches = 2\n'
    edited = applied(tmp_path, text, None)
    assert edited == '[pipeline]\ncuts = [2, 5] # both  # it\'s "fast" [\nmicrobatches = 2\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[train]\nlr = 1e-3\n",
        "[pipeline]\nmicrobatches = 2\n",
        "[pipeline]\ncuts = [\n  1,  # first\n  2,\n]\nmicrobatches = 2\n",
        'pipeline.cuts = [1]\npipeline.schedule = "GPipe"\n',
        "[pipeline]  # where\nstages = 3\ncuts = 'auto'",
        "pipeline = { cuts = [1] }\n",
        'boundary = [{ forward = { kind = "raw" } }]\n[pipeline]\ncuts = [1]\n',
        "[[boundary]]\ncut = 1\n[pipeline]\ncuts = [1]\n[[boundary]]\ncut = 1\n",
        "[pipeline]\ncuts = [1]\n[run]\nname = 'a'\n[data]\n",
    ],
)
def test_however_it_is_written(tmp_path: Path, text: str) -> None:
    edited = tomllib.loads(applied(tmp_path, text))
    del edited["boundary"]
    before = tomllib.loads(text)
    before.pop("boundary", None)
    before["pipeline"] = before.get("pipeline", {}) | {"cuts": [2, 5]}
    before["pipeline"].pop("stages", None)
    assert edited == before


def test_boundaries_may_stay_as_they_are(tmp_path: Path) -> None:
    text = '[pipeline]\ncuts = [1]\n[[boundary]]\nforward = { kind = "raw" }\n'
    assert '[[boundary]]\nforward = { kind = "raw" }\n' in applied(tmp_path, text, None)


def test_a_file_that_would_not_read_back_as_intended_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = tmp_path / "run.toml", "[pipeline]\ncuts = [1]\n"
    path.write_text(text)
    monkeypatch.setattr(apply, "_edit", lambda *_: text)
    with pytest.raises(ConfigError, match=r"(?s)put this into it by hand.*cuts"):
        apply_plan(path, (2, 5), None)
    assert path.read_text(encoding="utf-8") == text


def test_other_settings_are_written_beside_the_cuts(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[pipeline]\ncuts = [4] # mine\nreplicas = 1\n[gradcomp.cocktail]\nbits = 4\n")
    settings = {"replicas": 2, "placement": [["a"], ["b"]]}
    gradcomp = {"method": "cocktail", "cocktail": {"bits": 4, "subset": 0.2}}
    apply_plan(path, [], None, {"pipeline": settings, "gradcomp": gradcomp})
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    assert written == {"pipeline": {"cuts": [], **settings}, "gradcomp": gradcomp}
    assert "# mine" in path.read_text(encoding="utf-8")
