"""`python -m benchmarks.overlay`."""

from benchmarks.overlay.run import main

main()
