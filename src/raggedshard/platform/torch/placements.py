"""The ragged placements as torch placements: the neutral rules, on torch's own base class."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Placement

from raggedshard import placements as neutral

__all__ = ["RaggedShard", "RaggedStridedShard"]


class RaggedShard(neutral.RaggedShard, Placement):
    __doc__ = neutral.RaggedShard.__doc__

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        Placement.__init__(self)  # a C++ base: torch segfaults on a placement that skips it
        neutral.RaggedShard.__init__(self, dims, local_units)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"RaggedShard({self.dims}, {self.local_units})", {"RaggedShard": RaggedShard}


class RaggedStridedShard(neutral.RaggedStridedShard, RaggedShard):
    __doc__ = neutral.RaggedStridedShard.__doc__

    def __init__(self, dims: Sequence[int], local_units: Sequence[int], split_factor: int) -> None:
        Placement.__init__(self)
        neutral.RaggedStridedShard.__init__(self, dims, local_units, split_factor)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return (
            f"RaggedStridedShard({self.dims}, {self.local_units}, {self.split_factor})",
            {"RaggedStridedShard": RaggedStridedShard},
        )
