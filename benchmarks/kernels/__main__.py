"""`python -m benchmarks.kernels`."""

from benchmarks.kernels.run import main

main()
