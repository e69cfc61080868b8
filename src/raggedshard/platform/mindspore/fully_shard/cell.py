"""A sharded cell: its state, its lazy initialisation and the methods that users call on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mindspore import Parameter, nn

from raggedshard.fully_shard.methods import FSDPMethods
from raggedshard.fully_shard.state import HSDPState
from raggedshard.fully_shard.units import begin_run, named_modules
from raggedshard.platform.mindspore.fully_shard.hooks import MindSporeEngine
from raggedshard.platform.mindspore.fully_shard.param_group import HSDPParamGroup
from raggedshard.platform.mindspore.private import recomputes_reentrantly

__all__ = ["CELLS", "FSDPModule", "MindSporeState", "begin_forward", "mix_in", "state_of"]

_STATE = "_raggedshard_state"


class MindSporeState(HSDPState):
    """`HSDPState` of cells."""

    group: HSDPParamGroup | None

    def prefetch(self) -> None:
        if self.group is not None and not self.group.is_unsharded:
            self.group.is_ahead = True
        super().prefetch()


def state_of(cell: Any) -> MindSporeState | None:
    """The state of a cell that `fully_shard` was applied to."""
    return cell.__dict__.get(_STATE)


class _Cells:
    """The `ModuleTree` of MindSpore."""

    kind = "nn.Cell"

    def is_module(self, value: Any) -> bool:
        return isinstance(value, nn.Cell)

    def has_forward(self, module: nn.Cell) -> bool:
        return type(module).construct not in (nn.Cell.construct, nn.CellList.construct, nn.CellDict.construct)

    def children(self, module: nn.Cell) -> Iterable[tuple[str, nn.Cell]]:
        return [(name, child) for name, child in module._cells.items() if child is not None]

    def parameters(self, module: nn.Cell) -> Iterable[tuple[str, Parameter]]:
        return [(name, param) for name, param in module._params.items() if param is not None]

    def state_of(self, module: nn.Cell) -> MindSporeState | None:
        return state_of(module)


CELLS = _Cells()


def begin_forward(state: MindSporeState, cell: nn.Cell) -> None:
    """At the first forward: the outermost unit becomes the root."""
    if state.context is not None:
        return
    for root in state.modules:
        _refuse_reentrant_recompute(root)
        for param in root.get_parameters():  # in one order for all units: random values depend on it
            param.init_data()
    engine = MindSporeEngine()
    begin_run(state, state.modules, CELLS, engine)
    assert state.context is not None
    engine.states = state.context.states


def _refuse_reentrant_recompute(root: nn.Cell) -> None:
    """It differentiates with respect to the parameters that a cell had when it was set up: sharded ones get zeros."""
    for name, cell in named_modules(root, CELLS):
        if recomputes_reentrantly(cell):
            raise RuntimeError(
                f"cell '{name or type(cell).__name__}' is recomputed with use_reentrant=True, which loses the "
                "gradients of sharded parameters; call recompute(use_reentrant=False)"
            )


def mix_in(cell: nn.Cell, state: MindSporeState) -> None:
    cls = type(cell)
    cell.__dict__[_STATE] = state
    cell.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


class FSDPModule(FSDPMethods):
    """The methods that a sharded cell has on top of its own; mixed in by `fully_shard`."""

    def _fsdp_state(self) -> MindSporeState:
        state = state_of(self)
        assert state is not None
        return state

    def _fsdp_states(self, recurse: bool = True) -> Iterator[MindSporeState]:
        cells = [cell for _, cell in named_modules(self, CELLS)] if recurse else [self]
        return iter(dict.fromkeys(state for state in map(state_of, cells) if state is not None))

    def _fsdp_begin(self) -> None:
        state = self._fsdp_state()
        begin_forward(state, state.modules[0])

    def reset_sharded_params(self) -> None:
        """Rebuild the storage of this unit's shards after something replaced it, such as a cast; padding is zero then.

        Done by itself before each gather.
        """
        self.reshard()
        group = self._fsdp_state().group
        if group is not None:
            group.reset_sharded_params()
