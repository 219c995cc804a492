"""One process of a training run that `test_killed.py` starts: it saves, is killed, and is resumed.

    python -m tests.distributed.killed FOLDER RANK SIZE FIRST LAST WHEN STEP

Trains steps FIRST to LAST - 1, from the checkpoint of step FIRST if that is not 0, and saves before each other even
step. The last process gets SIGKILL at STEP: while the checkpoint is written (WHEN is "saving") or between two of the
step's collectives ("training").
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from mezzotint.distributed.checkpoint import load, save
from mezzotint.distributed.fsdp import low_precision_gather
from tests.distributed.sharded import model, optimizer, sharded, train
from tests.recipes import RECIPES

TIMEOUT = 20  # seconds that a collective waits for the others
RECIPE = RECIPES["delayed"]


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, rank: int, size: int, first: int, last: int, when: str, at: int) -> None:
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store-{first}", timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    made = sharded(low_precision_gather(model(), RECIPE))
    optim = optimizer(made)
    if first:
        assert load(folder / f"step-{first}", made, optim)["step"] == first
    losses = []
    for step in range(first, last):
        is_last = step == at and rank == size - 1
        if is_last and when == "saving":
            FileSystemWriter.write_data = die  # type: ignore[method-assign, assignment]
        if step % 2 == 0 and step != first:
            save(folder / f"step-{step}", made, optim, {"step": torch.tensor(step)})
        if is_last and when == "training":
            made[1].register_forward_hook(die)
        losses += train(made, RECIPE, 1, first=step, optim=optim)
        if rank == 0:
            (folder / f"losses-{first}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:6]), sys.argv[6], int(sys.argv[7]))
