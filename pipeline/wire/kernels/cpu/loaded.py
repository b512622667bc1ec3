"""Importing it loads what the first kernel of a process would."""

from numba.core.registry import cpu_target

from thinpipe.pipeline.wire.kernels.cpu import rows, uniform

__all__ = ["rows", "uniform"]

cpu_target.target_context.refresh()
