"""What a rank says when it fails."""

import pytest

from thinpipe.launch.run import ending


def test_an_operation_that_is_not_repeatable_is_named_with_the_setting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "end_now", lambda code, text="": None)
    monkeypatch.delenv("RANK", raising=False)
    error = RuntimeError(
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'."
    )
    ending.end_failed(error, None)
    said = capfd.readouterr().err
    assert "cumsum_cuda_kernel is not deterministic on a GPU" in said
    assert "pipeline.deterministic = false" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("ends", "code"), [(75, 1), (76, 1), (7, 7), (None, 0), ("words", 1)])
def test_a_programs_exit_code_never_says_that_others_go_on(
    ends: object, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """75 and 76 do, of a rank."""
    codes = list[int]()
    monkeypatch.setattr(ending, "end_now", lambda code, text="": codes.append(code))
    ending.end_failed(SystemExit(ends), None)
    assert codes == [code]
