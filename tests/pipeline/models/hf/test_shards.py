import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.disk import full_disk
from tests.huggingface import LAYERS, saved_model, section
from tests.often import mostly_slow
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.shards import INDEX, SINGLE, ShardError, Shards, write_shards
from thinpipe.pipeline.models.hf.stage import build_stage, check_folder

TENSORS = {f"w{i}": torch.full((2, 3), float(i)) for i in range(4)}
FILES = {"w0": "a.safetensors", "w1": "a.safetensors", "w2": "b.safetensors", "w3": "c.safetensors"}


def test_only_files_with_wanted_tensors_are_opened(tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS, FILES)
    (tmp_path / "b.safetensors").unlink()
    read = dict(Shards(tmp_path).read(["w1", "w3"]))
    assert read.keys() == {"w1", "w3"}
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in read.items())


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    message = r"b\.safetensors: not written: .*; free disk space"
    with pytest.raises(ShardError, match=message), full_disk():
        write_shards(tmp_path, {"w2": torch.ones(5000)}, FILES)


def test_one_tensor_at_a_time_is_resident(tmp_path: Path) -> None:
    megabyte = 2**20
    tensors = {f"w{i}": torch.ones(megabyte) for i in range(8)}
    write_shards(tmp_path, tensors, dict.fromkeys(tensors, SINGLE))
    most = 0
    for _, tensor in Shards(tmp_path).read(list(tensors)):
        assert tensor.sum() == megabyte
        mapped = (
            Path("/proc/self/smaps").read_text(encoding="utf-8").split(str(tmp_path / SINGLE))[1:]
        )
        most = max(most, sum(int(part.split("Rss:")[1].split()[0]) for part in mapped))
    assert 4 * 1024 <= most < 3 * 4 * 1024


def test_a_file_larger_than_memory_is_named_with_its_remedy(tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS, dict.fromkeys(TENSORS, SINGLE))
    length = int.from_bytes((tmp_path / SINGLE).read_bytes()[:8], "little")
    header = json.dumps(
        {"w0": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}
    ).ljust(length)
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 2**40)
    try:
        torch.UntypedStorage.from_file(str(tmp_path / SINGLE), False, 2**40)
    except RuntimeError:
        with pytest.raises(ShardError, match=r"cannot map a file of 1099\.5 GB .*max_shard_size"):
            Shards(tmp_path).shapes(["w0"])
    else:
        pytest.skip("this machine maps more than it has")


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS, dict.fromkeys(TENSORS, SINGLE))
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert Shards(tmp_path).shapes(["w0"]) == {"w0": [2, 3]}


def test_hosts_with_other_tensors_have_other_digests(tmp_path: Path) -> None:
    digests = set()
    for name in ("w0", "other"):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, {name: TENSORS["w0"]}, {name: SINGLE})
        digests.add(Shards(tmp_path / name).digest())
    assert len(digests) == 2


WEIGHT = "transformer.h.1.mlp.c_fc.weight"


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def _with(**changed: torch.Tensor) -> Callable[[Path], None]:
    """Save the file without the weight, or with another in its place."""

    def damage(file: Path) -> None:
        tensors = load_file(file)
        del tensors[WEIGHT]
        save_file(tensors | changed, file)

    return damage


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (Path.unlink, ["missing", INDEX, "transformer.h.", "copy or download"]),
        (_cut_short, ["truncated", "transformer.h.", "copy or download"]),
        (
            _with(**{WEIGHT: torch.zeros(32, 128, dtype=torch.int8)}),
            [f"{WEIGHT} is stored as I8", "unquantized"],
        ),
        (
            _with(**{WEIGHT: torch.zeros(32, 100)}),
            [f"{WEIGHT} has shape [32, 100]", "[32, 128]", "config.json"],
        ),
        (_with(), [f"lacks {WEIGHT}", INDEX]),
    ],
)
def test_a_bad_file_is_named_with_tensor_and_remedy(
    tmp_path: Path, damage: Callable[[Path], None], parts: list[str]
) -> None:
    config = HuggingFaceConfig(**section("gpt2", tmp_path))
    assert config.weight_files is not None
    file = tmp_path / config.weight_files.files[WEIGHT]
    damage(file)
    for use in (
        lambda: check_folder(config),  # what the launcher does: headers only
        lambda: build_stage(config, 0, 2, seed=0, device="cpu"),
    ):
        with pytest.raises(ShardError) as caught:
            use()
        assert str(file) in str(caught.value)
        for part in parts:
            assert part in str(caught.value)
    build_stage(config, 4, LAYERS, seed=0, device="cpu")  # another stage does not need the file


def change_config(folder: Path, **changes: object) -> HuggingFaceConfig:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}))
    return HuggingFaceConfig(pretrained=str(folder))


def test_a_config_with_other_layers_than_the_files_is_rejected(tmp_path: Path) -> None:
    saved_model("gpt2", tmp_path)
    with pytest.raises(ValueError, match=r"config.json has 9 layers, the files hold 6"):
        check_folder(change_config(tmp_path, n_layer=9))
    with pytest.raises(ValueError, match=r"transformer\.h\.4\..*only 4 layers"):
        check_folder(change_config(tmp_path, n_layer=4))


def test_a_tensor_that_no_file_holds_is_named(tmp_path: Path) -> None:
    saved_model("gpt2", tmp_path)
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    del index["weight_map"]["transformer.h.1.ln_1.bias"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    config = HuggingFaceConfig(pretrained=str(tmp_path))
    with pytest.raises(ValueError, match=rf"{INDEX}: transformer\.h\.1\.ln_1\.bias is missing"):
        check_folder(config)


def test_a_folder_without_usable_weights_is_rejected(tmp_path: Path) -> None:
    saved_model("gpt2", tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ValueError, match=rf"{INDEX}: not an index"):
        HuggingFaceConfig(pretrained=str(tmp_path))
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match=r"holds neither .*save_pretrained.*model\.config"):
        HuggingFaceConfig(pretrained=str(tmp_path))


def test_a_classifier_may_start_from_a_model_without_its_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModel

    saved_model("bert", tmp_path)
    base = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)
    base.save_pretrained(tmp_path / "base")
    config = HuggingFaceConfig(pretrained=str(tmp_path / "base"), task="classification", classes=5)
    with caplog.at_level(logging.WARNING):
        stages = [build_stage(config, *r, seed=0, device="cpu") for r in ((0, 3), (3, LAYERS))]
    assert "classifier.weight is not in" in caplog.text
    assert stages[1].model.classifier.weight.shape == (5, 32)
    loaded = stages[1].model.bert.encoder.layer[0].attention.self.query.weight
    assert torch.equal(loaded, base.encoder.layer[3].attention.self.query.weight)


@pytest.mark.parametrize("name", mostly_slow(["mixtral", "deepseek-v3"], "mixtral".__eq__))
def test_experts_stored_one_by_one_are_merged_and_checked(name: str, tmp_path: Path) -> None:
    config = HuggingFaceConfig(**section(name, tmp_path))
    assert config.weight_files is not None
    expert = next(
        key for key in config.weight_files.files if "layers.3." in key and ".experts.2." in key
    )
    check_folder(config)
    file = tmp_path / config.weight_files.files[expert]
    tensors = load_file(file)
    save_file({**tensors, expert: tensors[expert][:, :-1].contiguous()}, file)
    for use in (
        lambda: check_folder(config),
        lambda: build_stage(config, 2, 4, seed=0, device="cpu"),
    ):
        with pytest.raises(ShardError, match=r"layers\.3\..*experts.*belong to this config.json"):
            use()
    build_stage(config, 0, 2, seed=0, device="cpu")


def test_a_weight_without_dimensions_is_read(tmp_path: Path) -> None:
    save_file({"scale": torch.tensor(3.0), "w": torch.ones(2)}, tmp_path / SINGLE)
    assert dict(Shards(tmp_path).read(["scale", "w"]))["scale"] == torch.tensor(3.0)
