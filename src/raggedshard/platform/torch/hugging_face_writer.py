"""A guard on torch's ``HuggingFaceStorageWriter``, which keeps one box of each tensor and rank and drops the others.

No tensor of torch has several boxes on a rank; one whose ragged placement flattens several dims has, and torch's reader
does not notice what is missing. `raggedshard.platform.torch.checkpoint.save` gives such boxes files of their own.
Wrapped here, once, when this module is imported: plans that lose nothing go through to torch. Needed on torch 2.12 to
2.15; it can go when the writer refuses such a plan itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan

__all__: list[str] = []


def _wrap_write_data(original: Any) -> Any:
    @functools.wraps(original)
    def write_data(self: HuggingFaceStorageWriter, plan: SavePlan, planner: Any) -> Any:
        boxes = Counter(item.index.fqn for item in plan.items)
        several = sorted(key for key, count in boxes.items() if count > 1)
        if several:
            raise ValueError(
                f"key '{several[0]}': this rank holds {boxes[several[0]]} boxes of the tensor, of which "
                "HuggingFaceStorageWriter would keep one. Use raggedshard.torch.checkpoint.save, whose files "
                "HuggingFaceStorageReader reads, or torch's FileSystemWriter"
            )
        return original(self, plan, planner)

    return write_data


HuggingFaceStorageWriter.write_data = _wrap_write_data(HuggingFaceStorageWriter.write_data)
