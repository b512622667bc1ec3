"""Every private name of torch that we lean on: a torch upgrade fails here first, in words."""

import inspect
import sys
from typing import Any, get_args

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils._python_dispatch import TorchDispatchMode

from tests.programs import ran
from thinpipe.pipeline.schedule import CompressedStage
from thinpipe.pipeline.wire.told import ScheduleName

ADVICE = (
    "pipeline/schedule.py relies on it; read torch's new code before changing the supported range"
)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("__init__", ["submodule", "stage_index", "num_stages", "device", "group"]),
        ("forward_one_chunk", ["fwd_chunk_id", "args", "kwargs"]),
        ("forward_maybe_with_nosync", ["args", "kwargs"]),
        ("backward_one_chunk", ["bwd_chunk_id", "loss", "full_backward", "last_backward"]),
        ("backward_weight_one_chunk", ["bwd_chunk_id", "last_backward"]),
        ("get_fwd_recv_ops", ["fwd_chunk_id"]),
        ("get_bwd_recv_ops", ["bwd_chunk_id"]),
        ("get_fwd_send_ops", ["fwd_chunk_id"]),
        ("get_bwd_send_ops", ["bwd_chunk_id"]),
        ("_retrieve_recv_activations", ["fwd_chunk_id"]),
        ("_retrieve_recv_grads", ["bwd_chunk_id"]),
        ("set_local_fwd_input", ["prev_stage_outputs", "mb_index"]),
        ("set_local_bwd_input", ["next_stage_bwd_outputs", "mb_index"]),
        ("get_local_bwd_output", ["mb_index"]),
        ("clear_runtime_states", []),
        ("perform_reduce_grad", ["grad_scale_factor"]),
        ("_get_init_p2p_neighbors_ops", []),
        ("_prepare_forward_infra", ["num_microbatches", "args", "kwargs"]),
        ("_prepare_backward_infra", ["num_microbatches"]),
        ("_create_grad_recv_info", ["act_send_info"]),
    ],
)
def test_the_stage_base_has_the_methods_we_override(method: str, parameters: list[str]) -> None:
    found: Any = getattr(_PipelineStageBase, method, None)
    assert found is not None, f"_PipelineStageBase.{method} is gone; {ADVICE}"
    names = list(inspect.signature(found).parameters)[1:]
    assert names[: len(parameters)] == parameters, f"_PipelineStageBase.{method}{names}; {ADVICE}"


def test_no_other_method_of_the_base_communicates() -> None:
    """What torch adds to the base class must not bring back its own sends and receives."""
    source = {
        name: inspect.getsource(member)
        for name, member in vars(_PipelineStageBase).items()
        if inspect.isfunction(member)
    }
    ours = set(vars(CompressedStage))
    talkers = {name for name, text in source.items() if "dist.P2POp(" in text}
    assert talkers - ours <= {"_get_recv_ops"}, f"{talkers - ours}; {ADVICE}"


def test_a_split_backward_keeps_what_its_second_half_needs() -> None:
    """`_shared_with_weights` reads the gradients in it."""
    source = inspect.getsource(_PipelineStageBase.backward_one_chunk)
    kept = source[source.index("self.backward_state[bwd_chunk_id] = (") :].split(")")[0]
    assert [line.strip(" ,") for line in kept.splitlines()[1:-1]] == [
        'bwd_kwargs["input_values"]',
        "param_groups",
        'bwd_kwargs["stage_output"]',
        'bwd_kwargs["output_grads"]',
    ], ADVICE
    assert 'param_group["grads"][i] = grad_inputs' in inspect.getsource(stage_backward_input)


@pytest.mark.parametrize("name", sorted({*get_args(ScheduleName)} - {"Deep1F1B"}))
def test_schedules_take_our_options(name: str) -> None:
    parameters = inspect.signature(getattr(schedules, f"Schedule{name}")).parameters
    assert {"n_microbatches", "loss_fn", "scale_grads"} <= set(parameters)


def test_the_runtime_runs_orders_of_our_own() -> None:
    runtime = schedules._PipelineScheduleRuntime
    assert "actions" in inspect.signature(runtime._prepare_schedule_with_comms).parameters
    assert schedules._Action(0, schedules._ComputationType.FORWARD, 1).microbatch_index == 1
    assert schedules._ComputationType.FULL_BACKWARD


def test_the_local_launcher_is_configured_as_we_do() -> None:
    fields = set(inspect.signature(LaunchConfig).parameters)
    used = {"min_nodes", "max_nodes", "nproc_per_node", "run_id", "rdzv_backend", "rdzv_endpoint"}
    assert used | {"local_addr", "max_restarts"} <= fields
    assert "failures" in inspect.signature(ChildFailedError).parameters


def test_this_torch_is_in_the_supported_range() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (2, 11) <= (major, minor) < (2, 14)


def test_a_newcomer_starts_without_torchs_compiler() -> None:
    """Its import takes a second or two, in which others wait for the newcomer."""
    code = """
import sys
from importlib import import_module
from thinpipe.launch.net.ranks import fork_server as server
for name in ("thinpipe.launch.net.ranks.forked", *server.PRELOADED, *server.NEWCOMER):
    import_module(name)
import torch
from thinpipe.launch.optimizer import AdamW
from thinpipe.pipeline.models.transformer import TransformerConfig
stage = TransformerConfig(layers=1, vocab=9, dropout=0.1).build(0, 1, seed=0, device="cpu")
optimizer = AdamW(stage.parameters())
stage(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
sys.exit(", ".join({"torch._dynamo", "sympy", "numba"} & sys.modules.keys()) or 0)
"""
    ran(sys.executable, "-c", code)


def test_constructors_can_be_recorded() -> None:
    """What pipeline/models/own/deferred.py relies on."""
    draw = inspect.signature(torch.nn.init._no_grad_trunc_normal_).parameters
    assert list(draw) == ["tensor", "mean", "std", "a", "b", "generator"]
    recorded = []

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            recorded.append(func)
            return func(*args, **(kwargs or {}))

    with torch.device("meta"), Recorder():  # type: ignore[no-untyped-call]
        one = torch.empty(2, 3).normal_()
    assert [str(func) for func in recorded] == ["aten.empty.memory_format", "aten.normal_.default"]
    assert torch.Tag.nondeterministic_seeded in recorded[1].tags
    assert recorded[1]._schema.is_mutable
    assert one.untyped_storage()._cdata == one.T.untyped_storage()._cdata
