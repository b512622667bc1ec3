"""Kernels for CUDA devices, in triton."""
