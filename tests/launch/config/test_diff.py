"""Changed settings of a resumed run are reported, each that must be changed back."""

from typing import Any

from tests.training import TORCH_2_13
from thinpipe.launch.config.diff import changed_settings, describe_changes
from thinpipe.launch.config.run import RunConfig

BOUNDARIES: list[dict[str, Any]] = [
    {"forward": {"kind": "aqsgd", "bits": 4}},
    {"cut": 4, "backward": {"kind": "direct", "bits": 6}},
]
CUTS = {"cuts": [1, 2, 4]}


def described(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    base = {"pipeline": CUTS, "boundary": BOUNDARIES, "model": {"layers": 6}}
    runs = (RunConfig.model_validate({**base, **tables}).shared() for tables in (before, now))
    return describe_changes(changed_settings(*runs))


def test_equal_settings_and_those_that_may_change_are_not_reported() -> None:
    assert not described({}, {"run": {"name": "other"}, "eval": {"every_epochs": 2}})
    assert not described({}, {"pipeline": {"cuts": [2, 4], "microbatches": 2}})
    once, twice = ({"train": {"decay": "none", "epochs": epochs}} for epochs in (1, 2))
    assert not described(once, twice), "no learning rate depends on them"
    assert described({"train": {"epochs": 1}}, {"train": {"epochs": 2}})


@TORCH_2_13
def test_sites_may_change_with_the_number_of_shards_only() -> None:
    sites = {"ranks_per_site": 2}
    two, four = ({"pipeline": {"cuts": [1, 2, 4], "shards": count}} for count in (2, 4))
    assert described(four | {"shards": sites}, four) == [
        "shards.ranks_per_site = 2, this run has 1"
    ]
    assert not described(four | {"shards": sites}, two)


def test_changed_settings_are_reported_in_run_file_syntax() -> None:
    text = described(
        {"data": {"text_field": "text"}},
        {
            "boundary": [
                {"forward": {"kind": "aqsgd", "bits": 3}},
                {"cut": 4, "backward": {"kind": "raw"}},
            ],
            "model": {"layers": 6, "width": 32},
            "data": {"max_bytes": 100},
            "train": {"lr": 0.5, "betas": [0.8, 0.9]},
        },
    )
    assert text[:5] == [
        "data.max_bytes not set, this run has 100",
        'data.text_field = "text", not set in this run',
        "model.width = 128, this run has 32",
        "train.betas = [0.9, 0.999], this run has [0.8, 0.9]",
        "train.lr = 0.001, this run has 0.5",
    ]
    assert "boundary at cuts 1, 2: forward.bits = 4, this run has 3" in text
    other_kind = 'backward = { kind = "direct", bits = 6 }, this run has { kind = "raw" }'
    assert f"boundary at cut 4: {other_kind}" in text


def test_long_lists_of_changes_end_with_a_count() -> None:
    exchange = {"method": "cocktail", "cocktail": {"bits": 4, "topk": 0.1}}
    model = {"layers": 6, "width": 32, "heads": 8, "context": 256, "vocab": 512}
    train = {"lr": 0.5, "weight_decay": 0.5, "clip_norm": 2.0}
    text = described({"gradcomp": exchange}, {"model": model, "train": train})
    assert text[0] == "gradcomp.cocktail.bits = 4, not set in this run"
    assert len(text) == 9
    assert text[-1] == "2 more settings changed"


def test_frozen_weights_were_fp32_before_there_was_a_setting_and_are_with_shards() -> None:
    def saved(weights: str | None, shards: int = 1, *, lora: bool = True) -> dict[str, Any]:
        shared = RunConfig.model_validate({"model": {"layers": 6}}).shared()
        shared["model"] |= {"pretrained": "folder"} | ({"weights": weights} if weights else {})
        shared["model"] |= {"lora": {"rank": 2}} if lora else {}
        shared["pipeline"]["shards"] = shards
        return shared

    assert not changed_settings(saved(None), saved("fp32"))
    (change,) = changed_settings(saved(None), saved("bf16"))
    assert (change.name, change.before, change.now) == ("model.weights", "fp32", "bf16")
    assert not changed_settings(saved("bf16"), saved(None, shards=2))
    trained = changed_settings(saved("bf16", lora=False), saved(None, shards=2, lora=False))
    assert [change.name for change in trained] == ["model.weights"]
