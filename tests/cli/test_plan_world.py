"""`mezzotint plan --world`: what it says of a world that is not there is what processes of a real one count."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist

from mezzotint.trainer.console import as_count, as_size
from mezzotint.trainer.layout import Layout
from mezzotint.trainer.memory import plan_step
from mezzotint.trainer.mesh import fake_world
from mezzotint.trainer.model import LanguageModel
from mezzotint.trainer.recipes import COMMAND_RECIPES
from mezzotint.trainer.sizes import MODELS
from mezzotint.trainer.traffic import SentBytes
from tests.cli.plan_world import CASES, CHECKS, DENSE, QUICK, SIZE, SLOW_CHECKS
from tests.cli.tools import TINY, fails, losses, one_thread, row_of, works, write_text
from tests.worlds import Result, World, results, shared_world

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, CHECKS, SIZE)


@pytest.fixture(scope="module")
def slow_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, SLOW_CHECKS, SIZE)


@pytest.mark.parametrize("name", QUICK)
def test_a_world_of_four(world: World, name: str) -> None:
    check_counts([made[name] for made in results(world, "quick_cases")], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_more_worlds_of_four(slow_world: World, name: str) -> None:
    check_counts([made[name] for made in results(slow_world, "slow_cases")], name)


def check_counts(counted: list[Result], name: str) -> None:
    """Within a twentieth. Routers spread their tokens as they like: what is sent is compared in the mean."""
    config, layout, recipe = CASES[name]
    with one_thread():
        planned = plan_step(config, COMMAND_RECIPES[recipe], layout=layout)
    assert counted[0]["sent"].keys() == planned.sent.keys()
    for kind, size in planned.sent.items():
        assert size == pytest.approx(mean(each["sent"][kind] for each in counted), rel=0.05), kind
    for each in counted:
        assert planned.weights == pytest.approx(each["weights"], rel=0.05)
        assert planned.optimizer == pytest.approx(each["optimizer"], rel=0.05)
    assert planned.saved == pytest.approx(mean(each["saved"] for each in counted), rel=0.05)
    assert planned.peak == pytest.approx(mean(each["peak"] for each in counted), rel=0.05)


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_a_split_model_is_the_model(world: World, name: str) -> None:
    """But for the order of sums, in BF16: a token that is at the edge of two experts may go to the other one."""
    for made in results(world, "one_process"):
        whole, part = made[name]["losses"]
        assert part == pytest.approx(whole, rel=1e-3)
        for parameter, error in made[name]["errors"].items():
            assert error < (0.15 if "layernorm_mlp" in parameter and name == "sparse" else 0.03), parameter


def test_worlds_far_larger_than_the_machine() -> None:
    """Tensor parallel divides what a layer has, FSDP2 what a replica holds, and neither the bytes of a whole batch."""
    config, recipe = replace(MODELS["llama3-70b"], layers=3), COMMAND_RECIPES["mxfp8"]
    layouts = [Layout(), Layout(world=8, tp=8), Layout(world=1024, tp=8), Layout(world=1024, tp=8, fsdp=True)]
    alone, split, copies, shards = (plan_step(config, recipe, layout=layout) for layout in layouts)
    embedding = config.vocab * config.hidden
    assert split.parameters - embedding == pytest.approx((alone.parameters - embedding) / 8, rel=0.001)
    assert split.saved == pytest.approx(alone.saved / 8, rel=0.1)
    assert (copies.parameters, copies.saved) == (split.parameters, split.saved)
    assert shards.parameters == pytest.approx(copies.parameters / 128, rel=0.01)
    assert copies.sent["all-reduce"] == pytest.approx(2 * 127 / 128 * copies.gradients, rel=0.01)
    assert shards.sent["reduce-scatter"] - split.sent["reduce-scatter"] == pytest.approx(
        127 / 128 * copies.gradients, rel=0.01
    )


def test_what_sequence_parallel_sends() -> None:
    """By hand: a layer gathers its tokens before two products, in forward and, for the weight's gradient, in backward,
    and scatters sums behind two; backward has the same the other way. Of a tensor of n bytes 3/4 go to others."""
    tokens, tp = DENSE.batch * DENSE.sequence, 4
    one, two = (plan_step(replace(DENSE, layers=count), None, layout=Layout(world=tp, tp=tp)).sent for count in (1, 2))
    whole = 2 * tokens * DENSE.hidden  # BF16
    per_layer = {kind: two[kind] - one[kind] for kind in one}
    assert per_layer["reduce-scatter"] == 4 * whole * 3 // 4
    assert per_layer["all-gather"] == 6 * whole * 3 // 4
    assert per_layer["all-reduce"] == 2 * (2 * 4 * DENSE.hidden) * 3 // 4  # gradients of two norms, FP32


def test_table_and_json(capsys: Capture) -> None:
    options = ("plan", "tiny", "--recipes=mxfp8", "--world=16", "--tp=2", "--fsdp", "--experts=8", "--ep=4")
    said = works(capsys, *options)
    report = json.loads(works(capsys, *options, "--json"))
    whole, own = report["parameters"], report["recipes"]["mxfp8"]["parameters"]
    assert whole == sum(p.numel() for p in LanguageModel(replace(MODELS["tiny"], experts=8)).parameters())
    assert own < whole / 4
    assert f"tiny: {as_count(whole)} parameters, 2 layers" in said
    assert f"one of 16 ranks; tp 2; fsdp; ep 4; {as_count(own)} parameters each" in said
    assert report["layout"] == {"world": 16, "tp": 2, "fsdp": True, "ep": 4}
    sent = report["recipes"]["mxfp8"]["sent"]
    assert set(sent) == {"all-gather", "all-reduce", "all-to-all", "reduce-scatter"}
    row = row_of(said, "mxfp8")
    for size in (*sent.values(), sum(sent.values())):
        assert as_size(size) in row


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--world=0",), "--world is 0: give 1 or more"),
        (("--world=6", "--tp=4"), "--world is 6: give a multiple of --tp 4 and --ep 1"),
        (("--world=8", "--tp=4"), "--tp is 4: give a divisor of kv_heads=2"),
        (("--world=8", "--tp=2", "--tied"), "give --no-tied"),
        (("--world=8", "--tp=2", "--experts=4"), "--tp is 2, of a model of experts: give --ep"),
        (("--world=8", "--ep=4"), "--ep is 4, the model has 0 experts"),
        (("--world=8", "--ep=4", "--experts=6"), "--ep is 4, the model has 6 experts"),
        (("--world=8", "--tp=2", "--ep=3", "--experts=6"), "--ep is 3: give a multiple of --tp 2"),
        (("--experts=2", "--topk=3"), "topk is 3: give at most experts=2"),
    ],
)
def test_what_cannot_be_shared(capsys: Capture, options: tuple[str, ...], said: str) -> None:
    assert said in fails(capsys, "plan", "tiny", "--recipes=bf16", *options)


def test_no_world_inside_of_a_world(capsys: Capture, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert "one of a world already" in fails(capsys, "plan", "tiny", "--recipes=bf16", "--world=2")
    finally:
        dist.destroy_process_group()


def test_a_collective_that_is_not_known_is_not_left_out() -> None:
    with fake_world(2), SentBytes(), pytest.raises(NotImplementedError, match="scatter_ is a collective"):
        dist.scatter(torch.empty(1), [torch.empty(1), torch.empty(1)])


def test_experts_train(capsys: Capture, tmp_path: Path) -> None:
    """In one process, in eager mode."""
    path = write_text(tmp_path)
    options = ("--experts=4", "--steps=3", f"--data={path}", f"--out={tmp_path / 'run'}", *TINY)
    works(capsys, "train", *options)
    assert len(losses(tmp_path / "run")) == 3
    said = fails(capsys, "train", *[option for option in options if option != "--no-compile"], f"--out={tmp_path}/b")
    assert "--experts" in said
    assert "--no-compile" in said
