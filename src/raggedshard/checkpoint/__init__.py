"""Checkpoints in sharded safetensors files: the part that no framework is needed for."""

from raggedshard.checkpoint.agreement import AllRanks, Ranks, SingleRank, agree
from raggedshard.checkpoint.errors import CheckpointError
from raggedshard.checkpoint.layout import TensorLayout
from raggedshard.checkpoint.loading import load_tensors
from raggedshard.checkpoint.saving import save_tensors
from raggedshard.checkpoint.shard_file import ITEM_SIZES
from raggedshard.checkpoint.state import FlatState, flatten_state

__all__ = [
    "ITEM_SIZES",
    "AllRanks",
    "CheckpointError",
    "FlatState",
    "Ranks",
    "SingleRank",
    "TensorLayout",
    "agree",
    "flatten_state",
    "load_tensors",
    "save_tensors",
]
