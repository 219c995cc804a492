"""Where processes wait for each other, Inductor keeps the order of the program."""

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code

from mezzotint.comm.collectives import collective
from mezzotint.meeting import agree_op, meet_op
from tests.worlds import Result, results, run_world


def order(rank: int) -> Result:
    """The operators of a graph as Inductor calls them. Left alone it begins with the meetings."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def run(x: torch.Tensor, w: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        y = x
        for round_ in range(3):
            y = torch.sin(y @ w)
            wide = torch.cat([y, y, y, y]).detach()
            first = collective(wide.amax(0), "gather", 1, name)
            meet_op(mark, [round_], x.dtype, "recipe", "module", name, False, 0)
            agree_op(mark, "recipe", False, name, round_)
            second = collective(x.detach().amax(0) + round_, "max", 1, name)
            y = y + (first.sum() + second.sum()) * 1e-3
        return y

    given = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64), torch.ones(2)
    # Not what an earlier run has left on the disk, whose key does not tell how operators are lowered.
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        y, code = run_and_get_code(torch.compile(run, fullgraph=True), *given)
    calls = re.findall(r"torch\.ops\.mezzotint\.(\w+)\.default\((.*)\)$", code[0], re.MULTILINE)
    kinds = [re.findall(r"'gather'|'max'|\[\d\]|False", arguments)[0] for _, arguments in calls]
    return {
        "calls": list(zip([op for op, _ in calls], kinds, strict=True)),
        "error": float((y - run(*given)).detach().abs().max()),
    }


def test_meetings_and_collectives_keep_their_order(tmp_path: Path) -> None:
    (found,) = results(run_world(tmp_path, (order,), 1), "order")
    rounds = [
        [("collective", "'gather'"), ("meet", f"[{i}]"), ("agree", "False"), ("collective", "'max'")] for i in range(3)
    ]
    assert found["calls"] == [call for each in rounds for call in each]
    assert found["error"] < 1e-4
