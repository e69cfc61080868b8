"""raggedshard for MindSpore (PyNative mode): ``fully_shard`` whatever the sizes of the parameters.

The same names as `raggedshard.torch`, with the same meaning, and what MindSpore lacks: `DTensor`, `DeviceMesh`, a
start-up helper and torch's way to train (`enable_mindspore_backward_compact`).
"""

from raggedshard.fully_shard.methods import UnshardHandle
from raggedshard.fully_shard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from raggedshard.placements import Partial, RaggedShard, RaggedStridedShard, Replicate, Shard
from raggedshard.platform.mindspore import checkpoint
from raggedshard.platform.mindspore.backward import enable_mindspore_backward_compact
from raggedshard.platform.mindspore.clip import clip_grad_norm_
from raggedshard.platform.mindspore.collectives import enable_gloo, get_rank, get_world_size, init_process_group
from raggedshard.platform.mindspore.device_mesh import DeviceMesh, init_device_mesh
from raggedshard.platform.mindspore.distribute import distribute_tensor
from raggedshard.platform.mindspore.dtensor import DTensor
from raggedshard.platform.mindspore.fully_shard.api import fully_shard
from raggedshard.platform.mindspore.fully_shard.cell import FSDPModule
from raggedshard.platform.mindspore.parallel_styles import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from raggedshard.platform.mindspore.tensor_parallel import parallelize_module

__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "DTensor",
    "DeviceMesh",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Partial",
    "PrepareModuleInput",
    "RaggedShard",
    "RaggedStridedShard",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "UnshardHandle",
    "checkpoint",
    "clip_grad_norm_",
    "distribute_tensor",
    "enable_gloo",
    "enable_mindspore_backward_compact",
    "fully_shard",
    "get_rank",
    "get_world_size",
    "init_device_mesh",
    "init_process_group",
    "parallelize_module",
]
