"""Kernels for CPUs, compiled by numba; `llvm/` holds those written in LLVM's vector types."""
