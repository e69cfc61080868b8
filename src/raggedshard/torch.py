"""raggedshard for PyTorch: ``fully_shard`` whatever the sizes of the parameters.

``DTensor``, ``DeviceMesh``, ``Shard``, ``Replicate`` and ``Partial`` are torch's own; a sharded parameter is a subclass
of torch's ``DTensor`` whose placements may be ragged. Tensor parallelism and clipping are torch's too.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_

from raggedshard.fully_shard.methods import UnshardHandle
from raggedshard.fully_shard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from raggedshard.platform.torch import checkpoint
from raggedshard.platform.torch.distribute import distribute_tensor
from raggedshard.platform.torch.fully_shard.api import fully_shard
from raggedshard.platform.torch.fully_shard.module import FSDPModule
from raggedshard.platform.torch.placements import RaggedShard, RaggedStridedShard

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
    "fully_shard",
    "init_device_mesh",
    "parallelize_module",
]
