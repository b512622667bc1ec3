"""`python -m benchmarks.placement`."""

from benchmarks.placement.run import main

main()
