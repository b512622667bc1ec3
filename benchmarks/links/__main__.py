"""`python -m benchmarks.links`."""

from benchmarks.links.run import main

main()
