"""What a unit's parameters do together in every framework; a backend adds tensors and collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raggedshard.fully_shard.data_parallel import DataParallelRoles
from raggedshard.fully_shard.identity import describe_mismatch
from raggedshard.fully_shard.param import UnitParam
from raggedshard.fully_shard.reduction import divisors

__all__ = ["ParamGroup"]

P = TypeVar("P", bound=UnitParam[Any])
M = TypeVar("M", bound=DataParallelRoles)


@dataclass
class _Partial:
    """HSDP: sums over the shard dim whose all-reduce waits for a later backward."""

    params: list[Any]
    sums: list[Any]


class ParamGroup(ABC, Generic[P, M]):
    """The parameters of one unit and their communication.

    Args:
        params: in an order that is the same on every rank.
        dp_mesh: the mesh that shards (and replicates) them.

    Attributes:
        unit, unit_names: its number, which travels with its collectives, and all units' names by number.
        post_forward_group: the smaller group that gathers before backward, with ``reshard_after_forward=n``.
        is_unsharded: whether the unsharded parameters are in the modules.
    """

    def __init__(self, params: list[P], dp_mesh: M) -> None:
        self.params = params
        self.dp_mesh = dp_mesh
        self.unit = 0
        self.unit_names: Sequence[str] = ("",)
        self.gradient_divide_factor: float | None = None
        self.accumulate_in_reduce_dtype = True
        self.post_forward_group: Any = None
        self.is_unsharded = False
        self._partial: _Partial | None = None

    # ---- what a backend gives

    @property
    @abstractmethod
    def is_stale(self) -> bool:
        """Whether the sharded parameters were, or may have been, written to since they were gathered."""

    @abstractmethod
    def unshard(self, async_op: bool = False) -> None:
        """Start the all-gather; `wait_for_unshard` finishes it. Nothing happens if it is done or under way."""

    @abstractmethod
    def wait_for_unshard(self) -> None:
        """Finish the all-gather: the modules compute with the unsharded parameters afterwards."""

    @abstractmethod
    def _drop_gathered(self, after_forward: bool) -> None:
        """Let go of what an all-gather delivered beside the unsharded parameters."""

    @property
    @abstractmethod
    def has_unsharded_grads(self) -> bool:
        """Whether gradients wait for their reduction."""

    @property
    @abstractmethod
    def overlaps_reduction(self) -> bool:
        """Whether a reduction stays under way while the next unit's backward runs."""

    @abstractmethod
    def subgroup(self, size: int) -> Any:
        """This rank's group of ``size`` neighbours along the shard dim. Collective."""

    @abstractmethod
    def take_unsharded_grads(self) -> None:
        """Take the gradients that autograd left on the unsharded parameters."""

    @abstractmethod
    def start_reduce(self, all_reduce: bool) -> None:
        """Start to reduce the waiting gradients; `finish_reduce` hands them out.

        Parameters without a gradient take part with zeros, so the exchange is the same on ranks that used others.
        """

    @abstractmethod
    def finish_reduce(self) -> None:
        """Give each used parameter the gradient of its actual shard."""

    @abstractmethod
    def abandon_backward(self) -> None:
        """Drop what a backward that raised left behind: gradients not yet taken, a reduction not handed out."""

    # ---- what all share

    @property
    def trainable(self) -> list[P]:
        return [p for p in self.params if p.sharded_param.requires_grad]

    @property
    def has_trainable(self) -> bool:
        return any(p.sharded_param.requires_grad for p in self.params)

    def reshard(self, after_forward: bool = False) -> None:
        """Free the unsharded parameters and put the sharded ones back.

        Args:
            after_forward: backward will gather again, so keep what ``reshard_after_forward=n`` holds for it.
        """
        self._drop_gathered(after_forward)
        if not self.is_unsharded:
            return
        for p in self.params:
            p.to_sharded()
            p.free_unsharded()
        self.is_unsharded = False

    def reset_sharded_params(self) -> None:
        """``reset_sharded_param`` of all; the unit must be sharded."""
        for p in self.params:
            p.reset_sharded_param()

    def divisors(self, is_half: bool) -> tuple[float, float]:
        """What gradients are divided by before and after they are added up; ``is_half`` in float16."""
        ranks = self.dp_mesh.shard_world_size * self.dp_mesh.replicate_world_size
        return divisors(self.gradient_divide_factor, ranks, is_half)

    @property
    def has_partial_reduction(self) -> bool:
        """Whether gradients of earlier backwards wait for their all-reduce."""
        return self._partial is not None

    def keep_partial_sums(self, params: list[P], sums: list[Any]) -> None:
        """HSDP without all-reduce: ``sums`` over the shard ranks wait for a later backward."""
        self._partial = _Partial(params, sums)

    def take_partial_sums(self, params: list[P]) -> list[Any] | None:
        """What earlier backwards kept, to be added to the sums of ``params``; ``None`` if nothing.

        Raises:
            RuntimeError: the trainable parameters changed since then.
        """
        partial, self._partial = self._partial, None
        if partial is None:
            return None
        if partial.params != params:
            raise RuntimeError(
                f"unit '{self.unit_names[self.unit]}': parameters were frozen or unfrozen while gradients wait for "
                "their all-reduce. Do so after a backward with set_requires_all_reduce(True)"
            )
        return partial.sums

    def mismatch(self, action: str, others: Mapping[int, int]) -> RuntimeError:
        """The error for ranks of a group that run other units: ``others`` is rank -> unit."""
        return RuntimeError(describe_mismatch(action, self.unit, self.unit_names, dict(others)))
