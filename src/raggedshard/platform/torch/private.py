"""The private names of torch that the tensor class needs: all of them stand here, with the reason.

Present in torch 2.12 to 2.15. Each can go when torch exports the name it stands for.
"""

import torch.optim.optimizer as _optimizer
from torch._C import _current_graph_task_id as current_graph_task_id  # type: ignore[attr-defined]
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils import _foreach_utils
from torch.utils._mode_utils import no_dispatch

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "StridedShard",
    "TensorMeta",
    "current_graph_task_id",
    "no_dispatch",
    "support_foreach",
]

# AsyncCollectiveTensor: a DTensor's local tensor may be one; the bytes of a collective must have arrived.
# DTensorSpec, TensorMeta: what torch's DTensor is made from; the public from_local is an autograd function that
#     knows no ragged placement.
# StridedShard: torch's own placement for FSDP over TP has no public name.
# current_graph_task_id: says whether autograd is running; gradient formulas need DTensors where clipping needs
#     plain tensors.
# no_dispatch: in-place changes of shape (``t_``) must reach the wrapper's own sizes.


def support_foreach(tensor_class: type) -> None:
    """Let optimizers and clipping take their multi-tensor path: both keep a list of exact types."""
    for supported in (_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if tensor_class not in supported:
            supported.append(tensor_class)
