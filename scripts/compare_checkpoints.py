"""FSDP x TP checkpoints: torch's own fully_shard beside this package's, cell by cell, as a markdown table.

    python scripts/compare_checkpoints.py

Six processes on the CPU, about two minutes. A cell is one weight of (rows, 6) that tensor parallelism and fully_shard
both cut along its rows, on a mesh (fsdp, tp), and one thing that is done with it. After each the rows that every rank
holds are compared with those that it held before.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import raggedshard.torch as ours
from raggedshard.torch import checkpoint

ROWS = (1, 2, 3, 5, 6, 7, 9, 13, 50257)
COLUMNS = 6
MESHES = ((2, 2), (3, 2), (2, 3))
OTHER = {(2, 2): (3, 2), (3, 2): (2, 3), (2, 3): (2, 2)}
ACTIONS = ("full_tensor", "full state in", "save", "same layout", "other mesh", "one process")
KINDS = ("torch", "raggedshard", "raggedshard, checkpoint.save")
RIGHT, WRONG = "right", "**wrong values**"


def values(rows: int) -> torch.Tensor:
    return torch.arange(1.0, rows * COLUMNS + 1).view(rows, COLUMNS)


def build(kind: str, mesh_shape: tuple[int, int], rows: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("fsdp", "tp"))
    model: Any = nn.Sequential(nn.Linear(COLUMNS, rows, bias=False))
    model[0].weight.data.copy_(values(rows))
    parallelize_module(model[0], mesh["tp"], ColwiseParallel())
    (fully_shard if kind == "torch" else ours.fully_shard)(model[0], mesh=mesh["fsdp"])
    return model


def load(kind: str, state: dict[str, Any], path: Path) -> None:
    if kind.endswith("checkpoint.save"):
        checkpoint.load(state, path)
    else:
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())


def save(kind: str, state: dict[str, Any], path: Path) -> None:
    if kind.endswith("checkpoint.save"):
        checkpoint.save(state, path)
    else:
        dcp.save(state, checkpoint_id=path)


def restored(model: Any, fill: Callable[[Any], None]) -> str:
    """Whether ``fill`` brings back the rows that this rank holds after they were overwritten."""
    local = model[0].weight.detach().to_local()
    before = local.clone()
    local.fill_(-1)
    fill(model)
    return RIGHT if torch.equal(model[0].weight.detach().to_local(), before) else WRONG


def outcome(action: Callable[[], str]) -> str:
    try:
        return action()
    except (Exception, dcp.CheckpointException) as error:  # torch's is no Exception
        cause: BaseException = error
        if isinstance(error, dcp.CheckpointException):  # it wraps what each rank raised
            cause = next(iter(error.failures.values()))[0]
        return type(cause).__name__


def at_home(kind: str, mesh_shape: tuple[int, int], rows: int, path: Path) -> dict[str, str]:
    """What is done on the mesh that the weight is trained on."""
    model = build(kind, mesh_shape, rows)

    def gathered() -> str:
        return RIGHT if torch.equal(model[0].weight.full_tensor().detach(), values(rows)) else WRONG

    def full_state_in() -> str:
        options = StateDictOptions(full_state_dict=True)
        return restored(model, lambda m: set_model_state_dict(m, {"0.weight": values(rows)}, options=options) and None)

    def saved() -> str:
        save(kind, model.state_dict(), path)
        return RIGHT

    found = {"full_tensor": outcome(gathered), "save": outcome(saved)}
    if found["save"] == RIGHT:
        found["same layout"] = outcome(lambda: restored(model, lambda m: load(kind, m.state_dict(), path)))
    found["full state in"] = outcome(full_state_in)
    return found


def elsewhere(kind: str, mesh_shape: tuple[int, int], rows: int, path: Path) -> dict[str, str]:
    model = build(kind, mesh_shape, rows)
    return {"other mesh": outcome(lambda: restored(model, lambda m: load(kind, m.state_dict(), path)))}


def alone(kind: str, rows: int, path: Path) -> dict[str, str]:
    def loaded() -> str:
        state = {"0.weight": torch.full((rows, COLUMNS), -1.0)}
        load(kind, state, path)
        return RIGHT if torch.equal(state["0.weight"], values(rows)) else WRONG

    return {"one process": outcome(loaded)}


def in_group(rank: int, mesh_shape: tuple[int, int], store: Path, run: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Run on the first ranks, in a process group of their own: a failure leaves no trace in the next cell."""
    size = math.prod(mesh_shape)
    if rank >= size:
        return {}
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    try:
        return run()
    finally:
        dist.destroy_process_group()


def worker(rank: int, root: Path, barrier: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)  # torch logs what it raises too
    found = {}
    for kind in KINDS:
        for mesh_shape in MESHES:
            for rows in ROWS:
                cell = f"{kind}|{mesh_shape}|{rows}"
                path = root / f"cell{len(found)}"
                at = path.with_suffix(".home")
                results = in_group(
                    rank, mesh_shape, at, lambda k=kind, m=mesh_shape, r=rows, p=path: at_home(k, m, r, p)
                )
                barrier.wait()
                saved = os.path.isdir(path) and any((path / name).exists() for name in (".metadata", _INDEX))
                if saved:
                    other, at = OTHER[mesh_shape], path.with_suffix(".other")
                    results |= in_group(rank, other, at, lambda k=kind, m=other, r=rows, p=path: elsewhere(k, m, r, p))
                    if rank == 0:
                        results |= alone(kind, rows, path)
                barrier.wait()
                found[cell] = results
    (root / f"rank{rank}.json").write_text(json.dumps(found))


_INDEX = "model.safetensors.index.json"


def combine(outcomes: list[str]) -> str:
    """The cell's text: an error of any rank, else wrong values of any rank."""
    errors = sorted({text for text in outcomes if text not in (RIGHT, WRONG)})
    if errors:
        return "raises " + ", ".join(errors)
    return WRONG if WRONG in outcomes else RIGHT


def table(found: list[dict[str, dict[str, str]]], kind: str) -> list[str]:
    lines = [f"| mesh (fsdp, tp) | rows | {' | '.join(ACTIONS)} |", "|---|---|" + "---|" * len(ACTIONS)]
    for mesh_shape in MESHES:
        groups: dict[tuple[str, ...], list[int]] = {}
        for rows in ROWS:
            ranks = [of_rank[f"{kind}|{mesh_shape}|{rows}"] for of_rank in found]
            cells = []
            for action in ACTIONS:
                outcomes = [results[action] for results in ranks if action in results]
                cells.append(combine(outcomes) if outcomes else "nothing to load")
            groups.setdefault(tuple(cells), []).append(rows)
        for cells, of_rows in groups.items():
            lines.append(f"| {mesh_shape} | {', '.join(map(str, of_rows))} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = Path(tempfile.mkdtemp())
    try:
        barrier = mp.get_context("spawn").Barrier(6)
        mp.spawn(worker, args=(root, barrier), nprocs=6)
        found = [json.loads((root / f"rank{rank}.json").read_text()) for rank in range(6)]
    finally:
        shutil.rmtree(root)
    print(f"torch {torch.__version__.split('+')[0]}, gloo")
    for kind in KINDS:
        print("", f"### {kind}", "", *table(found, kind), sep="\n")


if __name__ == "__main__":
    main()
