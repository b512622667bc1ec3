"""`python -m benchmarks.time_to_loss`."""

from benchmarks.time_to_loss.run import main

main()
