"""A trained model, taken home: loaded, exported, sampled, trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.single_process import in_process
from tests.huggingface import saved_model, section
from tests.invoking import printed
from tests.training import TOKENS, VOCAB, checkpoints, config
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.tokenizer import load_tokenizer
from thinpipe.launch.trained.export_hf import export
from thinpipe.launch.trained.generate import Sampling, _Writer, generate, sample_lines
from thinpipe.launch.trained.model import load, read_trained, save_safetensors, start_from_run
from thinpipe.launch.trained.source import check_start
from thinpipe.pipeline.batch import Batch, Samples


def run_of(folder: Path, **sections: Any) -> RunConfig:
    return config(run={"folder": str(folder)}, **sections)


def saved(run: RunConfig, *, steps: int = 1) -> Tensor:
    """Train, save as a run does, and return the pipeline's logits."""
    with in_process(run, total_steps=10) as built:
        for step in range(steps):
            ids_BT = torch.arange(4 * TOKENS).view(4, TOKENS) * (step + 3) % 200
            ids_B = torch.arange(4 * step, 4 * step + 4)
            built.engine.train_step(Batch(ids_BT, ids_BT.roll(-1, 1), ids_B), step)
        checkpoints(run, built).save(steps)
        write_config(run, run.run.path / "config.toml")
        x: Tensor = prompts()
        with torch.no_grad():
            for stage in built.stages:
                module: Any = stage.submod
                x = module.eval()(x, Samples(torch.arange(2), None))
        return x


def prompts() -> Tensor:
    return torch.arange(2 * TOKENS).view(2, TOKENS) % VOCAB


def test_a_loaded_model_computes_what_the_pipeline_did(tmp_path: Path) -> None:
    logits = saved(run_of(tmp_path))
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(prompts()), logits)


@pytest.mark.parametrize(("name", "more"), [("gpt2", {"lora": {"rank": 2}}), ("mixtral", {})])
def test_a_loaded_model_of_transformers_is_one_of_its_classes(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    whole = saved_model(name, tmp_path / "source")
    run = run_of(tmp_path / "run")
    run = run.updated(model=section(name, tmp_path / "source", **more))
    logits = saved(run)
    model = load(tmp_path / "run")
    assert type(model) is type(whole)
    with torch.no_grad():
        found = model(input_ids=prompts(), use_cache=False).logits
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, whole(input_ids=prompts()).logits, atol=1e-5)


def test_safetensors_hold_what_the_whole_module_takes(tmp_path: Path) -> None:
    logits = saved(run_of(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"no class for the model.*--format safetensors"):
        export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    file = tmp_path / "new" / "own.safetensors"
    assert "step 1 of" in printed("export", tmp_path / "run", file, "--format", "safetensors")
    model = load(tmp_path / "run")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.load_state_dict(load_file(file))
        assert torch.equal(model(prompts()), logits)
    with pytest.raises(ConfigError, match="exists already"):
        save_safetensors(read_trained(tmp_path / "run"), file)
    with pytest.raises(ConfigError, match=r"ends in \.safetensors"):
        save_safetensors(read_trained(tmp_path / "run"), tmp_path / "own.pt")


@pytest.mark.parametrize("name", ["own", "gpt2"])
def test_text_depends_on_the_seed_alone(name: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    if name == "gpt2":
        run = run.updated(model=section(name, tmp_path / "source"))
    saved(run, steps=0)

    def text(tokens: int = 12, **more: Any) -> str:
        return "".join(generate(tmp_path / "run", "ab", Sampling(tokens, **more)))

    likeliest = text(temperature=0)
    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert likeliest == text(top_k=1, seed=5)
    assert likeliest.startswith(text(4, temperature=0))


def test_a_model_of_transformers_writes_with_its_cache_what_it_writes_without(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path / "run").updated(model=section("llama", tmp_path / "source"))
    saved(run, steps=0)
    written = "".join(generate(tmp_path / "run", "abc", Sampling(20, temperature=0)))
    model, ids = load(tmp_path / "run"), list(b"abc")
    for _ in range(20):
        with torch.no_grad():
            logits_V = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits_V.argmax()))
    expected = bytes(ids[3 : ids.index(0) if 0 in ids else None])
    assert expected.decode(errors="replace").startswith(written)
    assert written


def test_every_end_mark_stops_and_no_hole_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581self": 4, "\u2581name": 6, "name": 9}
    whole = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    whole.decoder = decoders.Metaspace(prepend_scheme="first")
    whole.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    run = run_of(tmp_path / "run", data={"tokenizer": str(tmp_path)})
    saved(run, steps=0)
    tokenizer = load_tokenizer(str(tmp_path))
    writer = _Writer(run, load(tmp_path / "run"), tokenizer, frozenset(tokenizer.ends))
    for end in (2, 1):
        drawn = iter((6, 9, end))

        def predict(_ids: list[int], drawn: Any = drawn) -> Tensor:
            logits_V = torch.zeros(256)
            logits_V[[3, 5, 7, 8, 10, 200]] = 50.0  # holes, and what is no token at all
            logits_V[next(drawn)] = 20.0
            return logits_V

        writer._predict = predict
        pieces = list(writer.write(tokenizer.encode("self"), Sampling(9, temperature=0)))
        assert pieces == [" name", "name"]


def test_the_command_writes_after_the_prompt_and_names_what_is_wrong(tmp_path: Path) -> None:
    saved(run_of(tmp_path / "run"), steps=0)
    run = tmp_path / "run"
    assert printed("generate", run, "--prompt", "ab", "--max-tokens", 5).startswith("ab")
    for folder, prompt, more, problem in (
        (tmp_path, "a", [], "holds no config.toml"),
        (run, "", [], "holds no token"),
        (run, "a", ["--temperature", "-1"], "Invalid value for"),
        (run, "a", ["--step", "9"], "step-9"),
    ):
        assert problem in printed("generate", folder, "--prompt", prompt, *more, code=2)


def test_a_run_shows_samples_if_asked_to(tmp_path: Path) -> None:
    run = run_of(tmp_path, eval={"samples": 2})
    assert sample_lines(run_of(tmp_path)) == []
    saved(run)
    lines = sample_lines(run)
    assert len(lines) == 4
    assert "thinpipe generate" in lines[-1]


def test_a_run_starts_from_the_weights_of_another(tmp_path: Path) -> None:
    saved(run_of(tmp_path / "old"), steps=2)
    more = {"pipeline": {"cuts": [1, 3]}, "train": {"decay": "linear"}}
    new = run_of(tmp_path / "new", model={"from_run": str(tmp_path / "old")}, **more)
    check_start(new)
    with in_process(new, total_steps=10) as built:
        before = read_trained(tmp_path / "old")
        note = start_from_run(built, new)
        assert note is not None
        assert "weights of step 2" in note
        for stage in built.stages:
            module: Any = stage.submod
            for name, tensor in module.state_dict().items():
                assert torch.equal(tensor, before.tensors[name])
        assert not built.optimizer.state_dict()["state"]


@pytest.mark.parametrize(
    ("folder", "problem"),
    [("new", "is this run's own folder"), ("nowhere", "holds no config.toml"), ("old", "no check")],
)
def test_a_run_to_start_from_is_checked_before_training(
    folder: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    write_config(run_of(tmp_path / "old"), tmp_path / "old" / "config.toml")
    new = run_of(tmp_path / "new", model={"from_run": str(tmp_path / folder)})
    with pytest.raises(ValueError, match=problem):
        check_start(new)
