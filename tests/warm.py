"""The last module that the tests' fork server loads: what each of its children would do again."""

import gc

from numba.core.registry import cpu_target
from PIL import Image

from tests.training import config
from thinpipe.launch.memory.host import check_host

Image.init()
cpu_target.target_context.refresh()  # as `kernels/cpu/loaded.py` does in the product's
check_host(config(), 4, range(2))  # loads what counts bytes; nothing is computed
gc.freeze()  # a collection would write to all that children share with the server
gc.enable()
