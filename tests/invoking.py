"""Commands in the process of the test, for those that start no ranks."""

from typer.testing import CliRunner

from thinpipe.launch.cli import app


def printed(*arguments: object, code: int = 0, typed: str | None = None) -> str:
    """What `thinpipe <arguments>` prints, which is to end with this exit code."""
    words = [*map(str, arguments)]
    done = CliRunner().invoke(app, words, input=typed, env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def said(*arguments: object, code: int = 0) -> str:
    """The same as words on one line."""
    return " ".join(printed(*arguments, code=code).split())


def invoke(*arguments: object) -> tuple[int, str]:
    """Exit code and output of `thinpipe <arguments>`, as words on one line."""
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())
