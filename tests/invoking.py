"""Commands in the process of the test, for those that start no ranks."""

from typer.testing import CliRunner

from thinpipe.launch.cli import app


def invoke(*arguments: object) -> tuple[int, str]:
    """Exit code and output of `thinpipe <arguments>`, as words on one line."""
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())
