"""Run files are strict: every error is named with its key, value and remedy."""

from pathlib import Path
from typing import Any

import pytest

from tests.training import TORCH_2_13
from thinpipe.aqsgd.config import AqsgdConfig
from thinpipe.launch.config.run import RunConfig, load_config, write_config
from thinpipe.launch.config.sections import TrainConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.pipeline.config import DirectConfig, RawConfig

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


def load(folder: Path, text: str = "", *overrides: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(text)
    return load_config(path, overrides)


def rejected(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


def test_an_empty_file_is_a_run_of_one_stage(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.world_size == 1
    assert config.run.path == Path("runs/run").resolve()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[run]\nfolder = 3", ["run.folder = 3: give text, in quotes"]),
        ("[train]\nlr = 'fast'", ["train.lr = 'fast': give a number"]),
        ("[train]\nlr = -1.0", ["train.lr = -1.0: use a number greater than 0"]),
        ("[train]\nepochs = 1.5", ["train.epochs = 1.5: give a whole number"]),
        ("[train]\nbetas = [0.9]", ["train.betas = [0.9]: give 2 values, as in [0.9, 0.999]"]),
        ("[memory]\nbudget = 'lots'", ["memory.budget = 'lots': write a size, as in \"8GB\""]),
        ("model = 3", ["model = 3: write it as a section [model]"]),
        ("[boundary]\ncut = 3", ["boundary = {'cut': 3}: write it as tables [[boundary]]"]),
        ("[model]\npretrained = '/nowhere'", ['model.pretrained = "/nowhere": no such folder']),
        (
            '[[boundary]]\nforward = {kind = "aqsgd", first_visit = "x"}',
            [
                "boundary.0.forward.first_visit = 'x': use 'fp32'",
                "or give a whole number, or write",
            ],
        ),
        (
            "[[boundary]]\nbackward = {bits = 3}",
            ["backward.kind: not given; use one of aqsgd, direct, raw"],
        ),
        ("[pipeline]\ncuts = [9]", ["pipeline.cuts = [9]", "use values from 1 to 7"]),
        ("[pipeline]\ncuts = [0]", ["pipeline.cuts = [0]", "use values from 1 to 7"]),
        ("[pipeline]\ncuts = [4, 2]", ["pipeline.cuts = [4, 2]", "write [2, 4]"]),
        ("[pipeline]\ncuts = [2, 2]", ["pipeline.cuts = [2, 2]", "write [2]"]),
        (
            "[model]\nlayers = 2\n[pipeline]\ncuts = [1, 2, 3]",
            ["4 stages for 2 layers", "every stage needs a layer"],
        ),
        ("[pipeline]\nschedule = '1f1b'", ["pipeline.schedule = '1f1b'", 'did you mean "1F1B"?']),
        (
            "[pipeline]\nschedule = 'GPipe'\ndepth = 3",
            ['pipeline.depth = 3: schedule = "GPipe" does not use it; remove it'],
        ),
        (
            "[model]\npooling = 'first'",
            ['model.pooling = "first": no longer a setting', "remove it"],
        ),
        ("[train]\nlr = inf", ["train.lr = inf", "finite"]),
        ("[train]\nbetas = [2.0, 0.9]", ["train.betas.0 = 2.0", "less than 1"]),
        ("[run]\nname = '..'", ["run.name = '..'"]),
        ('[[boundary]]\nforward = {kind = "aqsgd", scale_per = 0}', ["scale_per = 0"]),
        (
            '[[boundary]]\nforward = {kind = "aqsgd", bits = 4, rate = 0.6, coding = "zstd"}',
            [
                "boundary.0.forward.rate = 0.6: no longer a setting",
                'use kind = "transform" for a pretrained model, else kind = "aqsgd" with bits = 2',
                'boundary.0.forward.coding = "zstd": no longer a setting; remove it',
            ],
        ),
        (
            '[[boundary]]\nbackward = {kind = "direct", rate = 0.5}',
            ['else kind = "stateless" with bits = 4'],
        ),
        (
            '[[boundary]]\nforward = {kind = "auto", bits = 3}',
            ['boundary.0.forward.kind = "auto": no longer offered; use kind = "aqsgd" with first'],
        ),
        (
            '[[boundary]]\n[[boundary]]\nbackward = {kind = "direct", scale_dtype = "fp32"}',
            ['boundary.1.backward.scale_dtype = "fp32": no longer a setting; scales are bf16'],
        ),
        (
            '[[boundary]]\nbackward = {kind = "stateless", bits = 8}',
            ["boundary.0.backward.bits = 8: use 2 to 7"],
        ),
        (
            '[[boundary]]\nforward = {kind = "aqsgd", first_visit = {tile = 32}}',
            ["toml: boundary.0.forward.first_visit.tile = 32: no longer a setting; tiles have 64"],
        ),
        (
            '[[boundary]]\nbackward = {kind = "direct", bits = 1, rounding = "stochastic"}',
            ["boundary.0.backward", "bits >= 2"],
        ),
        (
            "[pipeline]\ncuts = [2]\nschedule = 'Interleaved1F1B'\nranks = 2",
            ["Interleaved1F1B", "2 stages on 2 ranks"],
        ),
        pytest.param(
            "[pipeline]\ndevices_per_rank = 2\n"
            "cuts = [2, 4, 6]\nschedule = 'InterleavedZeroBubble'",
            ["devices_per_rank = 2", "InterleavedZeroBubble", "torchgpipe cannot"],
            marks=TORCH_2_13,
        ),
        (
            "[pipeline]\ncuts = 'auto'\nstages = 2\ndevices_per_rank = 2",
            ['pipeline.cuts = "auto" measures blocks on one device'],
        ),
        (
            "[pipeline]\nreplicas = 2\ndevices_per_rank = 2",
            ["pipeline.replicas = 2", "use one replica"],
        ),
        (
            "[pipeline]\ncuts = [6]\ndevices_per_rank = 3",
            ["stage 1 has 2 of the model's layers", "every device needs one"],
        ),
        (
            "[pipeline]\noffload = true\ndevices_per_rank = 2",
            ["pipeline.offload = true with pipeline.devices_per_rank = 2", "use one device"],
        ),
        (
            "[pipeline]\noffload = true\n[gradcomp]\nmethod = 'qadam'",
            ['pipeline.offload = true with gradcomp.method = "qadam"', "use another method"],
        ),
        (
            "[model]\ntie_embeddings = 'exact'\n[pipeline]\ndevices_per_rank = 2",
            ["embedding and head are one weight on this rank"],
        ),
        ("[pipeline]\ncuts = [2]\nranks = 1", ["Deep1F1B", "one stage per rank"]),
        ("[data]\nsequence_length = 999", ["data.sequence_length = 999", "model.context = 128"]),
        (
            "[train]\nbatch_size = 7\n[pipeline]\nreplicas = 2",
            ["train.batch_size = 7", "pipeline.replicas = 2", "a multiple of 2"],
        ),
        ("[[boundary]]\ncut = 3", ["boundary.cut = 3", "no such cut; the pipeline has none"]),
        ("[[boundary]]\n[[boundary]]", ["two tables without a cut"]),
        (
            '[[boundary]]\nbackward = {kind = "auto"}',
            ["backward.kind = 'auto': use 'aqsgd', 'direct', 'transform', 'raw'"],
        ),
        (
            '[[boundary]]\nforward = {kind = "aqsgd", bits = 9}',
            ["boundary.0.forward.bits = 9: use 8 or less"],
        ),
        (
            '[gradcomp]\nmethod = "allreduse"',
            ['gradcomp.method = "allreduse"', "no such method; did you mean"],
        ),
        ("[gradcomp]\ncocktail = 3", ["gradcomp.cocktail = 3: write it as a table"]),
        ("[gradcomp]\nmetod = 1", ["gradcomp.metod", 'did you mean "method"?']),
        ("[model]\nvocab = 100", ["model.vocab = 100", "256"]),
        ("[train", ["cannot be read as TOML"]),
        ('extends = "missing.toml"', ["missing.toml: no such file", "correct extends in "]),
        ('[[host]]\nname = "a"', ["this is a hosts file; pass it to `thinpipe launch`"]),
        ('extends = "run.toml"', ["extends itself"]),
    ],
)
def test_an_error_is_named_with_its_remedy(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = rejected(tmp_path, text)
    for part in parts:
        assert part in message


def test_nothing_is_guessed_where_no_name_is_near(tmp_path: Path) -> None:
    message = rejected(tmp_path, "[pipeline]\ndevice = 'gpu'")
    assert message.endswith("pipeline.device = 'gpu': use 'auto', 'cpu' or 'cuda'")
    assert "run.toml" in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.lr", "write it as section.key=value"),
        ("boundary.5.cut=2", "no setting boundary.5.cut"),
        ("train.lrr=1", 'did you mean "lr"?'),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, part: str) -> None:
    assert part in rejected(tmp_path, "[[boundary]]", override)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.lrr=1", "train.lrr: unknown key"),
        ("trainn.lr=1", "trainn: unknown key"),
        ("train.lr=abc", "train.lr = 'abc': give a number"),
        ("pipeline.replicas=3", "train.batch_size = 16 cannot be divided evenly"),
    ],
)
def test_a_mistake_in_an_override_is_not_blamed_on_the_file(
    tmp_path: Path, override: str, problem: str
) -> None:
    assert rejected(tmp_path, "", override).startswith(f"--set {override}: {problem}")
    own = rejected(tmp_path, "[train]\nlrr = 1\n", "train.epochs=3")
    assert own.startswith(f"{tmp_path}/")


def test_overrides_are_toml_values_or_text(tmp_path: Path) -> None:
    text = "[pipeline]\ncuts = [2]\n[[boundary]]\nforward = {kind = 'aqsgd', bits = 4}"
    sets = ("boundary.0.forward.bits=3", "run.name=mine", "pipeline.cuts=[1,3]", "train.lr=2e-4")
    config = load(tmp_path, text, *sets)
    forward = config.boundary_at(1).forward
    assert isinstance(forward, AqsgdConfig)
    assert (forward.bits, config.run.name, config.train.lr) == (3, "mine", 2e-4)
    assert config.pipeline.cuts == (1, 3)


def test_an_empty_override_resets_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[run]\nname = "other"\n[train]\nlr = 1.0')
    config = load_config(file, ["train.lr=", "run.folder="])
    assert config.train.lr == 1e-3
    assert config.run.name == "other"


def test_a_file_extends_another(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[train]\nlr = 0.5\nepochs = 7\n[pipeline]\ncuts = [1, 2]")
    config = load(tmp_path, 'extends = "base.toml"\n[train]\nlr = 0.25\n[pipeline]\ncuts = [4]')
    assert (config.train.lr, config.train.epochs, config.pipeline.cuts) == (0.25, 7, (4,))


def test_an_empty_value_removes_a_key_of_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        '[data]\npath = "a.txt"\neval_path = "b.txt"\n[train]\nlr = 1'
    )
    config = load(tmp_path, 'extends = "base.toml"\ntrain = ""\n[data]\neval_path = ""')
    assert (config.data.path, config.data.eval_path) == ("a.txt", None)
    assert config.train == TrainConfig()
    with pytest.raises(ConfigError, match=r'data.evalpath: unknown key; did you mean "eval_path"'):
        load(tmp_path, 'extends = "base.toml"\n[data]\nevalpath = ""')


def test_each_cut_has_its_own_boundary(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        [pipeline]
        cuts = [2, 4, 6]
        [[boundary]]
        forward = { kind = "direct", bits = 5 }
        [[boundary]]
        cut = 4
        forward = { kind = "raw", format = "bf16" }
        backward = { kind = "raw" }
        """,
    )
    assert config.boundary_at(2).forward == config.boundary_at(6).forward == DirectConfig(bits=5)
    assert config.boundary_at(4).forward == RawConfig(format="bf16")
    assert config.boundary_at(2).backward == DirectConfig(bits=8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fixpoint", DirectConfig(bits=3)),
        ("delta", AqsgdConfig(bits=3)),
        ("delta-lowbits", AqsgdConfig(bits=3, memory=8)),
    ],
)
def test_names_of_ac_sgd_are_accepted(tmp_path: Path, name: str, expected: Any) -> None:
    text = f'[pipeline]\ncuts = [2]\n[[boundary]]\nforward = {{kind = "{name}", bits = 3}}'
    assert load(tmp_path, text).boundary_at(2).forward == expected


def test_explicit_settings_override_what_an_ac_sgd_name_implies(tmp_path: Path) -> None:
    text = "[pipeline]\ncuts = [2]\n[[boundary]]\nforward = {kind = 'delta-lowbits', memory = 4}"
    assert load(tmp_path, text).boundary_at(2).forward == AqsgdConfig(memory=4)
    without = load(tmp_path, text, "boundary.0.forward.memory=")
    assert without.boundary_at(2).forward == AqsgdConfig(memory=8)


@pytest.mark.parametrize(("theirs", "ours"), [("RANDOMP_RATIO", "subset"), ("TOPK_RATIO", "topk")])
def test_later_settings_win_under_either_name(tmp_path: Path, theirs: str, ours: str) -> None:
    for before in (theirs, ours):
        for after in (theirs, ours):
            (tmp_path / "base.toml").write_text(f"[gradcomp.cocktail]\n{before} = 0.5")
            extends = 'extends = "base.toml"\n[gradcomp.cocktail]\n'
            for config in (
                load(tmp_path, f"{extends}{after} = 0.25"),
                load(tmp_path, extends, f"gradcomp.cocktail.{after}=0.25"),
            ):
                assert config.gradcomp["cocktail"] == {ours: 0.25}
            unsaid = load(tmp_path, f'{extends}{after} = ""')
            assert unsaid.gradcomp["cocktail"] == {}


def test_two_names_of_one_setting_in_a_file_are_rejected(tmp_path: Path) -> None:
    message = rejected(tmp_path, "[gradcomp.cocktail]\nbits = 4\nQUANT_BITS = 8")
    assert "gradcomp.cocktail.QUANT_BITS and gradcomp.cocktail.bits are one setting" in message


def test_the_written_config_reads_back_equal(tmp_path: Path) -> None:
    text = """
        [data]
        train_sequences = "all"
        [train]
        clip_norm = 0.0
        [pipeline]
        cuts = [2, 5]
        [[boundary]]
        cut = 5
        forward = { kind = "delta", bits = 2, first_visit = "fp32" }
        [[boundary]]
        forward = { kind = "aqsgd", delta = "tiles", bits = 3, first_visit = { bits = 5 } }
        [gradcomp]
        method = "none"
        """
    config = load(tmp_path, text)
    write_config(config, tmp_path / "resolved.toml")
    again = load_config(tmp_path / "resolved.toml")
    assert again == config
    assert again.digest() == config.digest()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, marks=TORCH_2_13 if "\nshards = " in path.read_text() else (), id=path.stem
        )
        for path in EXAMPLES
    ],
)
def test_an_example_is_valid(path: Path) -> None:
    small = path.with_stem(f"{path.stem}_small")
    model = f'model.config="{load_config(small).model.config}"' if small.exists() else None
    load_config(path, [model] if model else [])


def test_dropout_with_delta_coding_warns(tmp_path: Path) -> None:
    text = "[model]\ndropout = 0.1\n[pipeline]\ncuts = [2]"
    note, warning = load(tmp_path, text).notices()
    assert 'model.tie_embeddings = "exact"' in note
    assert "model.dropout = 0.1" in warning
    assert "0.6" in warning
    without = ("model.dropout=0.0", 'model.tie_embeddings="exact"')
    assert load(tmp_path, text, *without).notices() == []
    repeated = 'model.dropout_masks="repeated"'
    assert load(tmp_path, text, repeated).notices() == [note]


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_an_unused_memory_folder_is_noted(tmp_path: Path, tier: str) -> None:
    notices = load(tmp_path, f"[memory]\nfolder = '/fast'\ntier = '{tier}'").notices()
    note = "note: memory.folder = '/fast' is not used: memory.tier = 'ram' keeps nothing on disk"
    assert notices == ([note] if tier == "ram" else [])


def test_classifiers_get_no_note_on_ties(tmp_path: Path) -> None:
    text = '[model]\ntask = "classification"\nclasses = 2\n[pipeline]\ncuts = [2]'
    fields = ("data.text_field=a", "data.label_field=b")
    assert load(tmp_path, text, *fields).notices() == []


@pytest.mark.parametrize(
    ("epochs", "spec", "expected"),
    [
        (1, '{ kind = "transform" }', "memory = false sends the same"),
        (1, '{ kind = "transform", memory = false }', None),
        (2, '{ kind = "transform" }', None),
        (1, '{ kind = "aqsgd" }', "AQ-SGD sends changes between epochs"),
    ],
)
def test_a_memory_that_does_nothing_in_a_single_epoch_is_noted(
    tmp_path: Path, epochs: int, spec: str, expected: str | None
) -> None:
    text = f"[pipeline]\ncuts = [2]\n[train]\nepochs = {epochs}\n"
    text += f"[[boundary]]\nforward = {spec}\nbackward = {{ kind = 'direct' }}\n"
    notes = [note for note in load(tmp_path, text).notices() if "train.epochs" in note]
    assert len(notes) == (expected is not None)
    assert all(expected in note for note in notes if expected)


def test_a_transform_of_random_weights_is_warned_of(tmp_path: Path) -> None:
    text = "[pipeline]\ncuts = [2]\n[[boundary]]\nforward = { kind = 'transform' }\n"
    for model, expected in (("", True), ("[model]\nfrom_run = 'runs/before'\n", False)):
        notices = load(tmp_path, model + text).notices()
        assert any("is for fine-tuning" in notice for notice in notices) == expected
