"""The program, the last process of which is killed with SIGKILL in the middle of writing its second checkpoint.

`test_train_world.py` starts it: python -m tests.cli.train_killed train …
"""

import os
import runpy
import signal
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter


def main() -> None:
    real, calls = FileSystemWriter.write_data, []

    def write_data(self: FileSystemWriter, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args)

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    runpy.run_module("mezzotint", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
