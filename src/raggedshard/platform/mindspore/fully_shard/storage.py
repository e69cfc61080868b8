"""The memory of a shard: the rows that this rank holds and, for an uneven parameter, the padding behind them."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from raggedshard.fully_shard.layout import ShardLayout
from raggedshard.platform.mindspore.private import alias, front_alias
from raggedshard.platform.mindspore.redistribute import to_tensor

__all__ = ["ShardStorage"]


class ShardStorage:
    """Values of an actual shard in memory that never moves, as optimizers that are compiled once need it.

        local  | 0 1 | 2 3 |          what the sharded parameter is
        flat   | 0 1 | 2 3 | 0 0 |    what a collective carries: the same memory and zeros

    Args:
        actual: the rows, of any strides.
        layout: whose padded size the memory gets; an even one gets no padding.
        dtype: MindSpore's.
    """

    def __init__(self, actual: np.ndarray, layout: ShardLayout, dtype: ms.Type) -> None:
        self._actual_numel = actual.size
        self._padded_numel = actual.size if layout.is_even else layout.padded_numel
        if layout.is_even:
            self.local = to_tensor(np.ascontiguousarray(actual), dtype)
            self.flat = self.local.reshape((-1,))
            return
        shape = actual.shape
        if ms.get_context("device_target") == "CPU":
            self._host = np.zeros(layout.padded_numel, ms.dtype_to_nptype(dtype))
            self.flat = Tensor.from_numpy(self._host)
            self.local = front_alias(self._host, shape)
        else:
            self._host = None
            self.flat = mint.zeros((layout.padded_numel,), dtype=dtype)
            self.local = alias(self.flat[: math.prod(shape)].reshape(shape))
        if actual.size:
            self.local.copy_(to_tensor(np.ascontiguousarray(actual), dtype))

    @property
    def padding_numel(self) -> int:
        return self._padded_numel - self._actual_numel

    def zero_padding(self) -> None:
        if not self.padding_numel:
            return
        if self._host is not None:
            self.flat.asnumpy()  # waits for what is still being written
            self._host[self._actual_numel :] = 0
        else:
            self.flat[self._actual_numel :] = 0

    def holds(self, param: Tensor) -> bool:
        """Whether ``param`` still is this memory."""
        return param.dtype == self.local.dtype and (
            self._actual_numel == 0 or param.data_ptr() == self.local.data_ptr()
        )
