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
