"""A stage's memory is counted without building it, and equals what the built one keeps."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.training import config
from thinpipe.launch.cli import app
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.memory.check import check_host, host_needs
from thinpipe.launch.memory.model import rank_memory
from thinpipe.launch.plan.predict import in_flight
from thinpipe.launch.plan.profile import _Bench, training_nbytes


def run_config(**model: Any) -> RunConfig:
    shape = {"layers": 4, "width": 32, "heads": 2, "context": 16} | model
    return config(model=shape, pipeline={"cuts": [1, 3], "microbatches": 2})


@pytest.mark.parametrize("model", [{}, {"width": 48, "heads": 4}, {"dropout": 0.1}])
def test_counted_bytes_are_those_that_real_blocks_keep(model: dict[str, Any]) -> None:
    run = run_config(**model)
    bounds = (0, 1, 3, 4)
    for stage, counted in enumerate(rank_memory(run)):
        benches = [_Bench(run, block) for block in range(bounds[stage], bounds[stage + 1])]
        numel = sum(parameter.numel() for bench in benches for parameter in bench._parameters)
        kept = sum(bench._activations() for bench in benches)
        assert counted.activations == in_flight(run, stage) * kept
        assert counted.total - counted.activations == training_nbytes(numel, numel)


def test_blocks_of_a_deep_model_are_counted_by_kind() -> None:
    deep, deeper = run_config(layers=64), run_config(layers=1000)
    block = (rank_memory(deep)[2].weights - rank_memory(run_config())[2].weights) / 60
    grown = rank_memory(deeper)[2].weights - rank_memory(deep)[2].weights
    assert grown == pytest.approx(936 * block)


def test_what_does_not_fit_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    for shape in ({"layers": 10**9}, {"width": 2**17, "layers": 16}):
        run = run_config(**shape)
        with pytest.raises(ConfigError, match=r"the 3 ranks on this host do not fit: RAM .* free"):
            check_host(run, 8, range(3))
        write_config(run, tmp_path / "run.toml")
        shown = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--dry-run"])
        assert shown.exit_code == 2, shown.output
        assert "TB of" in shown.output
    assert host_needs(run_config(), 8, range(3)).total < 10**9


def test_shards_divide_what_they_keep_and_hold_what_is_under_way() -> None:
    def memory(shards: int, gather: str) -> Any:
        pipeline = {"cuts": [], "microbatches": 2, "shards": shards}
        return rank_memory(config(pipeline=pipeline, shards={"gather": gather}))[0]

    whole = memory(1, "step")
    for gather in ("step", "microbatch"):
        two, four = memory(2, gather), memory(4, gather)
        assert two.optimizer == whole.optimizer // 2
        under_way = two.weights - whole.weights // 2
        assert four.weights - whole.weights // 4 == under_way
        assert under_way == whole.weights if gather == "step" else under_way > 0
        assert two.gradients - whole.gradients // 2 == (gather == "step") * whole.gradients
