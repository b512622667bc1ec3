"""`python -m thinpipe` is the command `thinpipe`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("thinpipe.launch", run_name="__main__", alter_sys=True)
