"""The one error of checkpoints."""

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file and the key that are at fault."""
