"""ThinPipe: pipeline-parallel training over slow networks, with every link compressed.

`pipeline` is the engine, `aqsgd` and `gradcomp` compress what crosses cuts and joins replicas,
`launch` configures, starts and watches runs.
"""

from importlib.metadata import version

__version__ = version("thinpipe")
