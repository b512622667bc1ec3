"""Loops over explicit SIMD vectors: numba intrinsics that emit LLVM IR."""
