"""The life of a sharded unit: when it is unsharded, resharded and reduced. No framework in here.

A backend attaches the four hooks to its modules and gives a `ParamGroup` and an `Engine`. One step of a unit:

    pre_forward   unshard, start the forward prefetch
    post_forward  reshard (or keep), note the order
    pre_backward  unshard again, start the backward prefetch, ask for the final callback
    post_backward take the gradients, reshard, start their reduction
    final         whatever a hook could not see: inputs that need no gradient, unused units, leftovers

Timing hooks are hints: the final callback completes every unit, so a hook that never fires costs overlap and memory
but never a gradient. All ranks run the same program, so they decide alike; where they do not, the unit's number that
travels with each collective turns the difference into an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from raggedshard.fully_shard.data_parallel import check_post_forward_ranks
from raggedshard.fully_shard.param_group import ParamGroup

__all__ = ["Engine", "HSDPState", "RunContext", "Use"]


class Engine(Protocol):
    """What the neutral runtime asks of a framework's autograd."""

    def is_grad_enabled(self) -> bool: ...
    def in_backward(self) -> bool: ...
    def queue_final_callback(self, callback: Callable[[], None]) -> None: ...


class TrainingState(Enum):
    """Where a unit is in its step."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class RunContext:
    """What the units under one root share: their order and what is under way."""

    def __init__(self, root: HSDPState, states: Sequence[HSDPState], engine: Engine) -> None:
        self.root = root
        self.states = tuple(states)
        self.engine = engine
        self.post_forward_order: list[HSDPState] = []
        self.is_last_backward = True
        self._callback_queued = False
        self._callback: Callable[[], _FinalCallback | None] = lambda: None
        self._reducing: HSDPState | None = None
        for state in states:
            state.context = self

    def ensure_final_callback(self) -> None:
        """Ask the engine, once per backward, to call `finalize_backward` at its end."""
        if self._callback_queued and self._callback() is None:
            self.abandon()  # the backward that held the callback raised
        if not self._callback_queued:
            self._callback_queued = True
            callback = _FinalCallback(self)
            self._callback = weakref.ref(callback)
            self.engine.queue_final_callback(callback)

    def begin_forward(self) -> None:
        """A forward outside of backward starts: a backward that never came to its end must have raised."""
        if self._callback_queued:
            self.abandon()

    def reduce(self, state: HSDPState) -> None:
        """Start a unit's reduction; at most one is under way, so that one set of buffers is alive."""
        self.finish_reduce()
        assert state.group is not None
        state.group.start_reduce(all_reduce=state.requires_all_reduce)
        self._reducing = state
        if not state.group.overlaps_reduction:
            self.finish_reduce()

    def finish_reduce(self) -> None:
        """Wait for the reduction under way and hand its gradients out."""
        reducing, self._reducing = self._reducing, None
        if reducing is not None and reducing.group is not None:
            reducing.group.finish_reduce()

    def finalize_backward(self) -> None:
        """The end of a backward: complete what the hooks did not."""
        self._callback_queued = False
        for state in reversed(self.states):
            state.complete_backward()
        self.finish_reduce()
        if self.is_last_backward:
            self.post_forward_order.clear()
            for state in self.states:
                state.forget_order()

    def abandon(self) -> None:
        """Forget a backward that ended in an error and its gradients, so that the next one starts clean."""
        self._callback_queued = False
        self._reducing = None
        self.post_forward_order.clear()
        for state in self.states:
            state.forget_order()
            if state.group is not None:
                state.group.abandon_backward()
                state.reshard()

    def drop_unused_prefetches(self) -> None:
        """After a forward that no backward follows: a unit that was prefetched and never ran goes back."""
        for state in self.states:
            if state.group is not None and state.is_prefetched:
                state.is_prefetched = False
                state.group.reshard()


class _FinalCallback:
    """Lives as long as the backward that is to call it."""

    def __init__(self, run: RunContext) -> None:
        self._run = run

    def __call__(self) -> None:
        self._run.finalize_backward()


class Use:
    """One forward of a unit, as its hooks in the graph name it."""


class HSDPState:
    """One unit: the flags that a user sets and the four hooks.

    Args:
        modules: the modules that make it, in the backend's classes.
        group: its parameters; ``None`` when it has none of its own.
        reshard_after_forward: ``True``, ``False``, an int (reshard to groups of so many ranks) or ``None``
            (``True``, except for the root, which backward needs first).
    """

    def __init__(
        self,
        modules: Sequence[Any],
        group: ParamGroup[Any, Any] | None,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.name = ""
        self.modules = tuple(modules)
        self.group = group
        self.context: RunContext | None = None
        self.set_reshard_after_forward(reshard_after_forward)
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.forward_prefetch: list[HSDPState] = []
        self.backward_prefetch: list[HSDPState] = []
        self.is_prefetched = False
        self.training_state = TrainingState.IDLE
        self._awaits_backward = False
        self._pending_uses: set[Use] = set()
        self._open_uses: set[Use] = set()
        self._order_positions: list[int] = []

    def set_reshard_after_forward(self, value: bool | int | None) -> None:
        """Change the argument of that name.

        Raises:
            ValueError: a number of ranks that does not divide those of the shard dim.
        """
        self.reshard_after_forward = value
        if self.group is not None:
            ranks = check_post_forward_ranks(value, self.group.dp_mesh)
            self.group.post_forward_group = None if ranks is None else self.group.subgroup(ranks)

    @property
    def is_root(self) -> bool:
        return self.context is not None and self.context.root is self

    @property
    def _run(self) -> RunContext:
        assert self.context is not None, "the unit's forward has not begun"
        return self.context

    @property
    def in_backward(self) -> bool:
        """Whether autograd is running: a forward in there is a recomputation."""
        return self._run.engine.in_backward()

    @property
    def is_grad_enabled(self) -> bool:
        return self._run.engine.is_grad_enabled()

    def unshard(self, async_op: bool = False) -> None:
        """Start (and unless ``async_op`` finish) gathering the unit's parameters, anew if they were written to."""
        if self.group is not None:
            if self.group.is_stale:
                self.group.reshard()
            self.group.unshard(async_op=async_op)
            if not async_op:
                self.group.wait_for_unshard()

    def prefetch(self) -> None:
        """Start gathering ahead of use."""
        if self.group is not None:
            self.is_prefetched = True
            self.group.unshard(async_op=True)

    def reshard(self) -> None:
        if self.group is not None:
            self.is_prefetched = False
            self.group.reshard()

    def pre_forward(self) -> None:
        """Before the module's forward: its parameters become whole."""
        run = self._run
        if self.in_backward:
            self._use()
            return
        run.begin_forward()
        if self.group is None:
            return
        self.training_state = TrainingState.FORWARD
        self.is_prefetched = False
        self.unshard()
        for state in self.forward_prefetch:
            state.prefetch()

    def resume_forward(self) -> None:
        """Before another of the unit's modules in the same forward: its parameters are, or become, whole."""
        self._use()

    def _use(self) -> None:
        """Unshard again, with the values of the forward where they are still there."""
        if self.group is not None:
            self.is_prefetched = False
            self.group.unshard()
            self.group.wait_for_unshard()

    def wants_post_backward(self) -> bool:
        """Whether this forward is to tell (through its inputs) when its backward is over.

        Not in a recomputation that was entered from the unit's own backward: the first forward's node still stands.
        """
        if self.group is None or not self._run.engine.is_grad_enabled():
            return False
        return self.training_state is not TrainingState.BACKWARD

    def note_post_backward(self, use: Use) -> None:
        """A node that will call `post_backward` was put into the graph."""
        if not self.in_backward:
            self._pending_uses.add(use)

    def post_forward(self) -> None:
        """After the module's forward: its parameters go back to shards unless backward is next."""
        run = self._run
        if self.in_backward:  # recomputation: the unit's own backward follows at once, so it stays whole
            return
        grad_enabled = run.engine.is_grad_enabled()
        self.training_state = TrainingState.IDLE
        if self.group is not None:
            if self._reshards_after_forward(grad_enabled):
                self.group.reshard(after_forward=grad_enabled)
            if grad_enabled:
                self._awaits_backward = True
                self._order_positions.append(len(run.post_forward_order))
                run.post_forward_order.append(self)
        if self.is_root and not grad_enabled:
            run.drop_unused_prefetches()

    def _reshards_after_forward(self, grad_enabled: bool) -> bool:
        if self.reshard_after_forward is None:
            return not (self.is_root and grad_enabled)
        return bool(self.reshard_after_forward)

    def pre_backward(self, use: Use) -> None:
        """Before the backward of the module's outputs: its parameters become whole again."""
        run = self._run
        run.ensure_final_callback()
        if self.group is None:
            return
        self.training_state = TrainingState.BACKWARD
        self._awaits_backward = True
        self._open_uses.add(use)
        self._use()
        for state in self._next_in_backward():
            state.prefetch()

    def _next_in_backward(self) -> list[HSDPState]:
        position = self._order_positions.pop() if self._order_positions else 0
        if self.backward_prefetch:
            return self.backward_prefetch
        order = self._run.post_forward_order
        return [order[position - 1]] if 0 < position <= len(order) else []

    def post_backward(self, use: Use) -> None:
        """The gradients of the module's inputs are there, so those of its parameters are too.

        A module that ran several times waits for the last of its uses: autograd adds up a parameter's gradient over
        all of them before it hands it over. It never goes back to shards while the backward of a use is under way.
        """
        self._pending_uses.discard(use)
        self._open_uses.discard(use)
        if not self._pending_uses and not self._open_uses:
            self._run.ensure_final_callback()
            self._complete()

    def complete_backward(self) -> None:
        """At the end of backward: reduce what is left, and go back to shards."""
        if self.group is None:
            return
        self._open_uses.clear()
        put_off = self.requires_all_reduce and self.group.has_partial_reduction
        if self._awaits_backward or self.group.has_unsharded_grads or put_off:
            self._complete()
        elif self.is_prefetched:
            self.reshard()

    def _complete(self) -> None:
        assert self.group is not None
        self.training_state = TrainingState.IDLE
        self._awaits_backward = False
        self.group.take_unsharded_grads()
        if self.reshard_after_backward:
            self.reshard()
        if self.requires_gradient_sync and self.group.has_trainable:
            self._run.reduce(self)

    def forget_order(self) -> None:
        """Between steps: no forward is waiting for its backward."""
        self._order_positions.clear()
        self._pending_uses.clear()
        self._open_uses.clear()
        self.training_state = TrainingState.IDLE
