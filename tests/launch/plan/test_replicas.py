"""Machines of a pipeline as replicas: bytes that are really sent, and the arithmetic of a step."""

import pytest
from rich.console import Console

from tests.gradcomp.test_contract import every_method
from tests.launch.plan.test_predict import config_of
from thinpipe.gradcomp.registry import method_names
from thinpipe.launch.plan.network import Network
from thinpipe.launch.plan.profile import BlockCost
from thinpipe.launch.plan.replicas import measure_exchange, replica_steps, show_replicas
