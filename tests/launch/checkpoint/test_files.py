import io
import json
import os
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.disk import full_disk
from tests.launch.checkpoint.steps import STAGES, finish, save, truncate
from thinpipe.launch.checkpoint import files as checkpoint
from thinpipe.launch.checkpoint.files import begin, read_part, write_part
from thinpipe.launch.checkpoint.manifest import CheckpointError, Manifest, Part


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_part_is_a_plain_safetensors_file_with_the_folder_s_permissions(tmp_path: Path) -> None:
    folder = begin(tmp_path, 0)
    part = write_part(folder, "stage-0", {"w": torch.ones(3)})
    path = folder / "stage-0.safetensors"
    assert torch.equal(load_file(path)["state['w']"], torch.ones(3))
    assert path.stat().st_mode & 0o777 == folder.stat().st_mode & 0o666
    assert Part(**json.loads(json.dumps(asdict(part)))) == part
    assert part.nbytes == path.stat().st_size


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_part_name_that_is_no_file_name_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="part = "):
        write_part(begin(tmp_path, 0), name, {})


def test_a_part_that_the_disk_has_no_room_for_is_told(tmp_path: Path) -> None:
    folder = begin(tmp_path, 0)
    message = r"stage-0\.safetensors: not written: .*`ulimit -f` allows 4,096 bytes"
    with pytest.raises(CheckpointError, match=message), full_disk():
        write_part(folder, "stage-0", {"w": torch.ones(5000)})


def test_a_finished_step_is_listed_named_and_readable(tmp_path: Path) -> None:
    save(tmp_path, 20)
    folder = save(tmp_path, 100, meta={"versions": {"torch": "x"}, "loss": 0.1})
    assert folder == tmp_path / "step-100"
    assert checkpoint.steps(tmp_path) == [20, 100]
    assert checkpoint.newest(tmp_path) == 100
    manifest = checkpoint.read_manifest(folder)
    assert manifest.step == 100
    assert manifest.meta == {"versions": {"torch": "x"}, "loss": 0.1}
    assert [part.name for part in manifest.parts] == list(STAGES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-100", "step-20"]


def test_a_folder_without_checkpoints_has_nothing(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "absent"):
        assert checkpoint.newest(root) is None
        assert checkpoint.steps(root) == checkpoint.offers(root) == []
        assert checkpoint.broken(root) == {}


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [(Path.unlink, "missing"), (truncate, r"truncated: \d+ of \d+ bytes"), (lengthen, "too long")],
)
def test_a_damaged_part_is_named_and_the_step_before_offered(
    tmp_path: Path, damage: Callable[[Path], None], wrong: str
) -> None:
    save(tmp_path, 40)
    folder = save(tmp_path, 50)
    damage(folder / f"{STAGES[1]}.safetensors")

    with pytest.raises(CheckpointError, match=wrong) as caught:
        read_part(folder, STAGES[1])
    message = str(caught.value)
    assert message.startswith(str(folder / f"{STAGES[1]}.safetensors"))
    assert message.endswith("step-40 is complete: train --resume --step 40, export --step 40")
    assert read_part(folder, STAGES[0])["step"] == 50
    assert read_part(tmp_path / "step-40", STAGES[1])["step"] == 40


@pytest.mark.parametrize("name", [f"{STAGES[0]}.safetensors", "manifest.json"])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, name: str) -> None:
    save(tmp_path, 40)
    path = save(tmp_path, 50) / name
    intact = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(intact)), 60):
        flip_bit(path, bit)
        with pytest.raises(CheckpointError) as caught:
            read_part(path.parent, STAGES[0])
        assert str(path) in str(caught.value), bit
        assert "step-40 is complete" in str(caught.value), bit
        path.write_bytes(intact)
    assert read_part(path.parent, STAGES[0])["step"] == 50


def test_an_unknown_part_is_rejected_with_the_known_ones(tmp_path: Path) -> None:
    folder = save(tmp_path, 50)
    with pytest.raises(CheckpointError) as caught:
        read_part(folder, "stage-9.replica-0")
    message = str(caught.value)
    assert message.startswith(f"{folder / 'manifest.json'}: has no part 'stage-9.replica-0'")
    assert STAGES[0] in message
    assert "no older complete step" in message


def test_only_a_step_that_holds_the_part_whole_is_offered(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    truncate(tmp_path / "step-20" / f"{STAGES[0]}.safetensors")
    (tmp_path / "step-30" / f"{STAGES[0]}.safetensors").unlink()
    truncate(tmp_path / "step-40" / f"{STAGES[0]}.safetensors")
    save(tmp_path, 50)

    with pytest.raises(CheckpointError, match="step-10 is complete"):
        read_part(tmp_path / "step-40", STAGES[0])


def test_a_manifest_of_another_format_or_none_is_rejected(tmp_path: Path) -> None:
    folder = save(tmp_path, 50)
    path = folder / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"format": 2', '"format": 3'))
    with pytest.raises(CheckpointError, match="format 3 is not the one read here, 2"):
        checkpoint.read_manifest(folder)
    with pytest.raises(CheckpointError, match=r"step-51/manifest\.json: missing"):
        checkpoint.read_manifest(tmp_path / "step-51")


def test_an_exception_between_begin_and_finish_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 40)
    write_part(begin(tmp_path, 50), "stage-7", {})
    assert checkpoint.newest(tmp_path) == 40
    save(tmp_path, 50)
    assert not (tmp_path / "step-50" / "stage-7.safetensors").exists()


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 40, seed=1)
    before = read_part(tmp_path / "step-40", STAGES[0])
    save(tmp_path, 40, seed=2, meta={"run": "second"})
    assert not torch.equal(read_part(tmp_path / "step-40", STAGES[0])["w"], before["w"])
    assert checkpoint.read_manifest(tmp_path / "step-40").meta == {"run": "second"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-40"]
    assert len(list((tmp_path / "step-40").iterdir())) == len(STAGES) + 1


def test_a_failed_replacement_keeps_the_old_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 40, seed=1)
    before = read_part(tmp_path / "step-40", STAGES[0])
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(source).name == ".step-40.partial" and Path(target).name == "step-40":
            raise PermissionError("no move")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        folder = begin(tmp_path, 40)
        part = write_part(folder, STAGES[0], {})
        with pytest.raises(PermissionError):
            finish(tmp_path, 40, parts=[part])
    assert torch.equal(read_part(tmp_path / "step-40", STAGES[0])["w"], before["w"])


def test_a_host_with_its_own_disk_lists_the_parts_of_others(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    parts = [
        write_part(begin(mine, 40), "stage-0", {"stage": 0}),
        write_part(begin(theirs, 40), "stage-1", {"stage": 1}),
    ]
    for root in (mine, theirs):
        finish(root, 40, parts=parts)
    assert checkpoint.steps(mine) == [40]
    assert read_part(mine / "step-40", "stage-0") == {"stage": 0}
    with pytest.raises(CheckpointError, match=r"stage-1\.safetensors: missing"):
        read_part(mine / "step-40", "stage-1")


def test_a_state_too_large_for_its_header_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"large; keep long lists as tensors$"):
        write_part(begin(tmp_path, 0), "stage-0", {"long": "x" * 100_000_001})


def test_finish_rejects_parts_that_are_not_the_files(tmp_path: Path) -> None:
    folder = begin(tmp_path, 40)
    one, two = (write_part(folder, name, {}) for name in ("one", "two"))
    with pytest.raises(CheckpointError, match="holds two, which are not in parts"):
        finish(tmp_path, 40, parts=[one])
    with pytest.raises(CheckpointError, match=r"two\.safetensors: truncated"):
        finish(tmp_path, 40, parts=[one, Part("two", two.nbytes + 1, two.sha256)])
    assert checkpoint.newest(tmp_path) is None


def test_publishing_twice_agrees_only_with_the_same_parts(tmp_path: Path) -> None:
    part = write_part(begin(tmp_path, 40), "stage-0", {"a": 1})
    manifest = Manifest(40, 7, 1, {}, (part,))
    checkpoint.prepare(tmp_path, manifest)
    folder = checkpoint.publish(tmp_path, manifest)
    assert checkpoint.publish(tmp_path, manifest) == folder  # another host on this file system
    other = Manifest(40, 7, 1, {}, (Part("stage-0", part.nbytes, "0" * 64),))
    with pytest.raises(CheckpointError, match="does not hold the same parts"):
        checkpoint.publish(tmp_path, other)


def test_a_step_that_is_only_prepared_is_offered_and_can_be_completed(tmp_path: Path) -> None:
    save(tmp_path, 40)
    part = write_part(begin(tmp_path, 50), "stage-0", {"a": 1})
    manifest = Manifest(50, 7, 50, {}, (part,))
    checkpoint.prepare(tmp_path, manifest)
    assert checkpoint.newest(tmp_path) == 40
    (offer,) = [offer for offer in checkpoint.offers(tmp_path) if offer.prepared]
    assert (offer.step, offer.serial, offer.digest) == (50, 50, manifest.digest)
    assert read_part(offer.folder(tmp_path), "stage-0") == {"a": 1}
    checkpoint.publish(tmp_path, manifest)
    assert checkpoint.newest(tmp_path) == 50


def test_the_step_that_was_saved_last_is_the_newest_whatever_its_number(tmp_path: Path) -> None:
    for serial, step in enumerate((10, 20, 30, 15), start=1):
        save(tmp_path, step, serial=serial)
    assert checkpoint.newest(tmp_path) == 15
    assert checkpoint.steps(tmp_path) == [10, 15, 20, 30]


def test_a_folder_that_was_renamed_to_another_step_is_told(tmp_path: Path) -> None:
    save(tmp_path, 40).rename(tmp_path / "step-50")
    with pytest.raises(CheckpointError, match="is that of step 40; the folder was renamed"):
        checkpoint.read_manifest(tmp_path / "step-50")
    assert list(checkpoint.broken(tmp_path)) == [50]


def test_steps_that_are_removed_meanwhile_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any look at the file system, one after the other."""
    save(tmp_path, 1)
    kept, away = save(tmp_path, 2), tmp_path / "away"
    looks, due, found = 0, 0, set[tuple[int, ...]]()
    for owner, name in ((os, "listdir"), (os, "stat"), (io, "open")):
        there = getattr(owner, name)

        def look(*arguments: Any, call: Any = there, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            if looks == due:
                kept.rename(away)
            return call(*arguments, **options)

        monkeypatch.setattr(owner, name, look)
    while True:
        looks, due = 0, due + 1
        found.add(tuple(checkpoint.steps(tmp_path)))
        if looks < due:
            break
        away.rename(kept)
    assert found == {(1,), (1, 2)}
    assert due > 5


def test_the_step_of_the_best_evaluation_stays_and_is_named(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    checkpoint.settle(tmp_path, 40, keep=1, best=20)
    assert (checkpoint.steps(tmp_path), checkpoint.best(tmp_path)) == ([20, 40], 20)
    save(tmp_path, 50)
    checkpoint.settle(tmp_path, 50, keep=1, best=50)
    assert (checkpoint.steps(tmp_path), checkpoint.best(tmp_path)) == ([50], 50)
    checkpoint.settle(tmp_path, 50, keep=1, best=7)
    assert checkpoint.best(tmp_path) == 50, "a step that is not here is not named"
