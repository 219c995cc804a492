"""`mezzotint plan --world`: what it says of a world that is not there is what processes of a real one count."""

from statistics import mean

import pytest

from mezzotint.cli.memory import plan_step
from mezzotint.cli.recipes import RECIPES
from tests.cli.plan_world import CASES, CHECKS, SIZE
from tests.cli.tools import one_thread
from tests.worlds import World, results, run_world

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return run_world(tmp_path_factory.mktemp("world"), CHECKS, SIZE)


@pytest.mark.parametrize("name", CASES)
def test_a_world_of_four(world: World, name: str) -> None:
    """Within a twentieth. Routers spread their tokens as they like: what is sent is compared in the mean."""
    config, layout, recipe = CASES[name]
    with one_thread():
        planned = plan_step(config, RECIPES[recipe], layout=layout)
    counted = [made[name] for made in results(world, "cases")]
    assert counted[0]["sent"].keys() == planned.sent.keys()
    for kind, size in planned.sent.items():
        assert size == pytest.approx(mean(each["sent"][kind] for each in counted), rel=0.05), kind
    for each in counted:
        assert planned.weights == pytest.approx(each["weights"], rel=0.05)
        assert planned.optimizer == pytest.approx(each["optimizer"], rel=0.05)
    assert planned.saved == pytest.approx(mean(each["saved"] for each in counted), rel=0.05)
    assert planned.peak == pytest.approx(mean(each["peak"] for each in counted), rel=0.05)
