"""`python -m launch`: the same as `thinpipe`, for torchrun."""

from launch.cli import main

if __name__ == "__main__":
    main()
