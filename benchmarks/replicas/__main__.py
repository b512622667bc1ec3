"""`python -m benchmarks.replicas`."""

from benchmarks.replicas.run import main

main()
