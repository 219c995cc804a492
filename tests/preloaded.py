"""What takes seconds to import, once for all processes of `worlds.py`: they are forked from one that has this module.

A compiler imports much of itself when it first compiles. So it does here, something small; its state is reset after.
"""

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import mezzotint  # noqa: F401
from tests.spared import spare_measurements


def _compile_something_small() -> None:
    spare_measurements()
    x = torch.ones(2, requires_grad=True)
    torch.compile(torch.sin, backend="aot_eager")(x).sum().backward()
    torch._dynamo.reset()


torch.set_num_threads(1)  # a process with more threads than one is not forked well
_compile_something_small()
