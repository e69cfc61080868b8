"""What a unit's parameter is in every framework: its place, its sizes and its dtypes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raggedshard.fully_shard.data_parallel import DataParallelRoles, ShardedPlan

__all__ = ["Slot", "UnitParam"]

M = TypeVar("M", bound=DataParallelRoles)


@dataclass(frozen=True)
class Slot:
    """A place in a module that holds a parameter.

    Args:
        path: the module's name below the unit, with a trailing dot; empty for the unit's own module.
    """

    module: Any
    name: str
    path: str

    @property
    def full_name(self) -> str:
        return self.path + self.name


class UnitParam(ABC, Generic[M]):
    """A parameter of a unit, without its tensors.

    Args:
        slots: the places in modules that hold it.
        dp_mesh: the mesh that shards (and replicates) it.
        size: the global shape.
        placed: where its shards are.
        policy_dtypes: ``param_dtype`` and ``reduce_dtype`` of the user's policy.

    Attributes:
        sharded_param: what the optimizer holds, for good: a DTensor Parameter of the logical shape.
        sharded_size: shape of this rank's actual shard.
        padded_sharded_param_size: shape of what a collective carries for each rank.
        orig_dtype, param_dtype, reduce_dtype: of the shard, of computation and all-gather, of the reduction.
    """

    is_meta = False
    """Whether it has no values yet."""

    sharded_param: Any
    orig_dtype: Any
    param_dtype: Any
    reduce_dtype: Any

    def __init__(
        self,
        slots: Sequence[Slot],
        dp_mesh: M,
        size: Sequence[int],
        placed: ShardedPlan,
        policy_dtypes: tuple[Any, Any],
    ) -> None:
        self.name = slots[0].full_name
        self.slots = slots
        self.dp_mesh = dp_mesh
        self.layout = placed.plan.layout
        self._orig_size: Any = size
        self._spmd_mesh = placed.mesh
        self._spmd_placements = placed.placements
        self._policy_dtypes = policy_dtypes

    # ---- what a backend gives

    @abstractmethod
    def shard(self, param: Any) -> None:
        """Put this rank's shard of ``param`` into the modules. Nothing was changed before."""

    @abstractmethod
    def reset_sharded_param(self) -> None:
        """Restore the storage behind the actual shard after a module method replaced it; padding is zero then.

        The Parameter object stays the one that optimizers hold.
        """

    @abstractmethod
    def to_sharded(self) -> None:
        """Let the modules hold the sharded parameter."""

    @abstractmethod
    def free_unsharded(self) -> None:
        """Let go of the unsharded parameter's memory."""

    # ---- what all share

    @property
    def sharded_size(self) -> tuple[int, ...]:
        return self.layout.sharded_size(self.dp_mesh.shard_rank)

    @property
    def padded_sharded_param_size(self) -> tuple[int, ...]:
        return self.layout.padded_sharded_param_size

    def choose_dtypes(self, orig_dtype: Any, is_floating: bool) -> None:
        """The policy's dtypes, for parameters of floating-point numbers."""
        param_dtype, reduce_dtype = self._policy_dtypes if is_floating else (None, None)
        self.orig_dtype = orig_dtype
        self.param_dtype = param_dtype if param_dtype is not None else orig_dtype
        self.reduce_dtype = reduce_dtype if reduce_dtype is not None else self.param_dtype

    def check_size(self, shape: Sequence[int]) -> None:
        """What there is to shard must have the logical shape.

        Raises:
            ValueError: tensor parallelism has cut the parameter in another way.
        """
        if tuple(shape) != self.layout.size:
            raise ValueError(
                f"parameter '{self.name}' of shape {tuple(self._orig_size)}: its tensor-parallel shard has shape "
                f"{tuple(shape)}, expected {self.layout.size}; distribute it with distribute_tensor"
            )

    def check_sharded_size(self, shape: Sequence[int]) -> None:
        """A local shard that a module method put in must have the actual shape.

        Raises:
            ValueError: it has not.
        """
        if tuple(shape) != self.sharded_size:
            raise ValueError(
                f"parameter '{self.name}' of shape {tuple(self._orig_size)}: its local shard became "
                f"{tuple(shape)}, expected {self.sharded_size} for placements {self._spmd_placements}"
            )
