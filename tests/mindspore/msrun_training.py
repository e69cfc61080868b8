"""What `test_ms_msrun` starts under msrun: trains beside the unsharded cell; the losses go to a file for each rank."""

import json
import sys
from pathlib import Path

import mindspore as ms

from ms_training import OddMLP, float_batches, mesh_of, shard_odd_mlp, train_beside, twin
from raggedshard.mindspore import get_rank, get_world_size, init_process_group


def main(directory: str) -> None:
    ms.runtime.launch_blocking()
    init_process_group()
    rank, world_size = get_rank(), get_world_size()
    reference, model = twin(OddMLP)
    shard_odd_mlp(model, mesh=mesh_of(world_size))
    losses = train_beside(rank, world_size, model, reference, "SGD", float_batches(2), "value_and_grad")
    Path(directory, f"rank{rank}.json").write_text(json.dumps([world_size, *losses]))


if __name__ == "__main__":
    main(sys.argv[1])
