"""ThinPipe: pipeline-parallel training over slow networks, with every link compressed.

`pipeline` is the engine, `aqsgd` and `gradcomp` compress what crosses cuts and joins replicas,
`launch` configures, starts and watches runs.
"""

from importlib.metadata import version as _version

__version__ = _version("thinpipe")
