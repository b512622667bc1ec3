"""Codecs on kernels other than those of their device."""

import contextlib
from collections.abc import Iterator

import pytest

from thinpipe.pipeline.wire import kernels


@contextlib.contextmanager
def using(backend: kernels.Backend) -> Iterator[None]:
    """Inside, all codecs on the CPU use this backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels._AUTO, "cpu", backend)
        yield
