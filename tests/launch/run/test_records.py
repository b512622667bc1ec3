"""Records of steps that are done again."""

from contextlib import ExitStack
from pathlib import Path

from tests.records import step_record
from tests.training import config
from thinpipe.launch.run.records import Records, describe_run
from thinpipe.launch.view.report.metrics import read_metrics
from thinpipe.launch.view.terminal.display import Display


def test_steps_are_done_again_and_what_was_measured_stays(tmp_path: Path) -> None:
    """Also if the last step is the one that all go back to, which is written with the next."""
    run = config(run={"folder": str(tmp_path / "run")})
    records = Records(run, describe_run(run, 9), Display(None), writes=True)
    path = tmp_path / "run/metrics.jsonl"
    (tmp_path / "run").mkdir()
    with ExitStack() as stack:
        records.open(stack, None)
        for step in (1, 2, 3):
            records.add(step_record(step, eval=None))
        records.evaluated({"loss": 2.5})
        records.go_back(3)
        assert [(r.step, r.eval) for r in read_metrics(path)][2:] == [(3, {"loss": 2.5})]
        records.go_back(1)
        assert [r.step for r in read_metrics(path)] == [1]
        for step in (2, 3):
            records.add(step_record(step, loss=0.5, eval=None))
    found = [(r.step, r.loss, r.eval) for r in read_metrics(path)]
    assert found[1:] == [(2, 0.5, None), (3, 0.5, {"loss": 2.5})]
