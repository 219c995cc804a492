"""What each process of a world does with `mezzotint train`: the program runs in each, several times over."""

import io
import math
import os
import signal
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from mezzotint.cli.main import main
from mezzotint.trainer import data
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.training import Training
from tests.cli.tools import TINY
from tests.worlds import Result

STEPS = 6
# Two replicas of half the batch are one process with the whole.
COMMON = (*TINY, "--kv-heads=2", f"--steps={STEPS}", "--log-every=2", "--checkpoint-every=2")
SHARDS = (*COMMON, "--fsdp", "--recipe=delayed")
WIDE = ("--hidden=64", "--ffn=128")  # shards of whole blocks
EXPERTS = ("--experts=4", "--recipe=delayed")
QUICK = ("delayed", "nvfp4")  # recipes: a state, and the fewest bits


def folder() -> Path:
    """Of text and runs, known to the test and to all processes."""
    return Path(os.environ["MEZZOTINT_TEST_FOLDER"])


def train(*options: Any) -> Result:
    """Code, and what this process said."""
    # As torchrun has them: the first process speaks.
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "localhost"}
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["train", *map(str, options)])
    dist.barrier()
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def begin(name: str, *options: str) -> Result:
    return train(*COMMON, f"--data={folder() / 'text.txt'}", f"--out={folder() / name}", *options)


def resume(name: str, *options: str) -> Result:
    return train("--resume", f"--out={folder() / name}", *options)


def recipes(rank: int) -> Result:
    """Shards of weights."""
    return {name: begin(f"two {name}", "--fsdp", f"--recipe={name}", "--steps=3", *WIDE) for name in QUICK}


def more_recipes(rank: int) -> Result:
    names = [name for name in COMMAND_RECIPES if name not in QUICK]
    return {name: begin(f"two {name}", "--fsdp", f"--recipe={name}", "--steps=3", *WIDE) for name in names}


def layouts_of_two(rank: int) -> Result:
    more = ("--steps=3",)
    return {
        "copies": begin("two copies", *more, "--accumulate=2"),
        "tensors": begin("two tensors", *more, "--tp=2", "--recipe=mxfp8", *WIDE),
        "experts": begin("two experts", *more, "--ep=2", *EXPERTS),
    }


def held_out(rank: int) -> Result:
    """Evaluation changes nothing that is trained, in any layout; shards write a sample."""
    found: Result = {}
    for name, options in (("shards", SHARDS[len(COMMON) :]), ("tensors", ("--tp=2", "--recipe=delayed", *WIDE))):
        options = (*options, "--steps=3", "--hold-out=0.25", "--checkpoint-every=0")
        found[f"blind {name}"] = begin(f"blind {name}", *options)
        more = ("--eval-every=1", *(("--sample=5",) if name == "shards" else ()))
        found[name] = begin(f"held out {name}", *options, *more)
    found["no sample"] = begin("no sample", "--tp=2", "--sample=5")
    return found


def whole(rank: int) -> Result:
    """A run that nothing happens to, and those of the same options that were killed or stopped."""
    found = {"whole": begin("whole", *SHARDS[len(COMMON) :]), "killed": resume("killed")}
    real = Training.run_step

    def run_step(self: Training) -> None:
        if rank == 1 and self.step + 1 == 3:
            signal.raise_signal(signal.SIGTERM)
        real(self)

    with patch.object(Training, "run_step", run_step):
        found["stopped"] = begin("stopped", *SHARDS[len(COMMON) :])
    names = sorted(path.name for path in (folder() / "stopped/checkpoints").iterdir())
    dist.barrier()
    return {**found, "checkpoints": names, "resumed": resume("stopped")}


def from_one_process(rank: int) -> Result:
    return {"resumed": resume("one", "--fsdp")}


def wrong(rank: int) -> Result:
    """What cannot be: of all processes, of one of them, or not the same on all."""
    found = {
        "usage": train("--stepps=3"),
        "both": train("--resume", "--overwrite"),
        "size": begin("wrong", "--tp=4"),
        "heads": begin("wrong", "--tp=2", "--heads=1", "--kv-heads=1"),
        "there": begin("whole"),
        "differs": begin("wrong", f"--lr={rank + 1}"),
    }

    def read_text(*given: Any) -> Any:
        if rank == 1:
            raise CommandError("there is no text here")
        return data.read_text(*given)

    with patch("mezzotint.cli.train.read_text", read_text):
        found["one"] = begin("wrong")
    real = Training.run_step

    def run_step(self: Training) -> None:
        real(self)
        self.losses[self.step - 1] = math.nan

    with patch.object(Training, "run_step", run_step):
        found["nan"] = begin("nan", "--steps=2")
    return {**found, "is there": (folder() / "wrong").exists()}


def compiled(rank: int) -> Result:
    """The whole model as one graph, and with shards a graph for each layer."""
    found: Result = {}
    for name, options in (("tensors", ("--tp=2",)), ("shards", ("--fsdp",))):
        options = (*options, "--steps=2", "--layers=1", "--checkpoint-every=0")
        with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
            found[name] = begin(f"compiled {name}", *options, "--compile")
        found[f"eager {name}"] = begin(f"eager {name}", *options)
    return found


def layouts_of_four(rank: int) -> Result:
    """Everything at once, twice; and a run of two processes goes on."""
    both = ("--tp=2", "--fsdp", "--recipe=nvfp4", *WIDE)
    found = {"both": begin("four", *both, "--steps=4")}
    if rank == 0:
        (folder() / "four/checkpoints/step-00000004").rename(folder() / "last")
    dist.barrier()
    found["resumed"] = resume("four")
    found["larger"] = resume("larger", "--tp=2")
    found["copies"] = resume("copies", "--tp=2", "--no-fsdp")
    found["more experts"] = resume("more experts", "--ep=4")
    found["experts"] = begin("four experts", "--steps=3", "--tp=2", "--ep=2", "--fsdp", *EXPERTS)
    return found


CHECKS: tuple[Callable[[int], Result], ...] = (
    recipes,
    layouts_of_two,
    whole,
    from_one_process,
    wrong,
)
SLOW_CHECKS: tuple[Callable[[int], Result], ...] = (more_recipes, held_out, compiled)
CHECKS_OF_FOUR: tuple[Callable[[int], Result], ...] = (layouts_of_four,)
