"""Policies of a sharded unit. Dtypes are the backend's own; torch's policy objects are accepted in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit's computation and communication.

    Args:
        param_dtype: dtype of the unsharded parameters, so of the all-gather and the computation; ``None`` keeps the
            parameters' own. The sharded parameters that the optimizer holds keep their dtype.
        reduce_dtype: dtype in which gradients are reduced, and accumulated while they are not synchronised;
            ``None`` means the dtype of the computation.
        output_dtype: dtype to which floating-point outputs of the module are cast; ``None`` leaves them.
        cast_forward_inputs: whether floating-point inputs of the module are cast to ``param_dtype``.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients and so the optimizer's state in host memory.

    Args:
        pin_memory: whether the host memory is page-locked, where the device can use that.
    """

    pin_memory: bool = True
