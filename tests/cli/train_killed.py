"""The program, one process of which is killed with SIGKILL; for `test_train_world.py`, which starts it with torchrun.

    torchrun … -m tests.cli.train_killed PLACE TIME train …

The last process ends at the beginning of its TIMEth step, or in the middle of writing its TIMEth checkpoint.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from mezzotint.cli.training import Training


def killing(real: Callable[..., Any], time: int) -> Callable[..., Any]:
    calls: list[Any] = []

    def count(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == time:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    return count


def main() -> None:
    place, time = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        if place == "step":
            Training.run_step = killing(Training.run_step, time)  # type: ignore[method-assign]
        else:
            FileSystemWriter.write_data = killing(FileSystemWriter.write_data, time)  # type: ignore[method-assign]
    runpy.run_module("mezzotint", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
