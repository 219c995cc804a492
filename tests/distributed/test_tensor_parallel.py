"""Linears whose weight processes share, in worlds of two and four: the bits of one process, in every recipe."""

import pytest

from tests.distributed.parallel import unit
from tests.distributed.tensor_parallel_world import CHECKS, CHECKS_OF_FOUR, KEPT, MODES, RAGGED, compiled
from tests.quantizer_formats import FORMATS
from tests.recipes import RECIPES, VARIANTS
from tests.worlds import World, results, shared_world

# A sum over processes is of numbers that were rounded to BF16 before, and is rounded again: each by half a unit in the
# last place, 2^-8, of numbers that may be twice the result.
BOUND = 2.0**-6


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, CHECKS, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> World:
    return shared_world(tmp_path_factory, CHECKS_OF_FOUR, 4)


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world of its own: it takes long."""
    return shared_world(tmp_path_factory, (compiled,), 2)


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> World:
    return request.getfixturevalue(request.param)


def check(world: World, name: str, case: str, bound: float = BOUND) -> None:
    for found in results(world, name):
        assert found[case]["wrong"] == []
        assert found[case]["sums"] <= bound


@pytest.mark.parametrize("tokens", ["whole", "tokens"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_one_process(world: World, recipe: str, mode: str, tokens: str) -> None:
    """Column: y, dW and db bit for bit; row: dx and dW. The sums over processes within the bound of their rounding."""
    check(world, "linears", f"{recipe} {mode} {tokens}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", VARIANTS)
def test_variants_equal_one_process(two: World, recipe: str, mode: str) -> None:
    check(two, "linears", f"{recipe} {mode} tokens")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RAGGED)
def test_blocks_that_shards_would_cut(world: World, recipe: str, mode: str) -> None:
    check(world, "ragged", f"{recipe} {mode}")


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8", "nvfp4"])
def test_no_tokens(two: World, recipe: str) -> None:
    for mode in MODES:
        for sp in (False, True):
            check(two, "no_tokens", f"{recipe} {mode} {sp}")


def test_buffers_are_those_of_the_whole(world: World) -> None:
    """Of every format and direction that says that it can be gathered; which those are."""
    cannot = {name for name in FORMATS if name.endswith("_swizzled")}
    only_rows = {name for name in FORMATS if name.startswith(("float8_current", "float8_delayed"))}
    random = {name for name, fmt in FORMATS.items() if fmt.is_random}
    expected = {f"{name} row" for name in FORMATS if name not in cannot | random}
    expected |= {f"{name} column" for name in FORMATS if name not in cannot | random | only_rows | {"hybrid_chained"}}
    for found in results(world, "shards"):
        assert found["wrong"] == []
        assert set(found["gathered"]) == expected


def gathered(recipe: str, mode: str) -> dict[str, int]:
    """Bytes of this process's tokens (m, K), of what is gathered in a step: x in forward (row-wise) and for dW
    (column-wise), or dy (both)."""
    m, k = unit(recipe), unit(recipe) * 2
    n = m * k
    rup4, rup128 = -(-k // 32 // 4) * 4, -(-k // 128) * 128
    both = {
        "none": {"bfloat16": 2 * n},
        "delayed": {"uint8": n},
        "current": {"uint8": n},
        "block": {"uint8": 2 * n, "float32": 4 * (m * k // 128 + m // 128 * k)},
        "mxfp8": {"uint8": 2 * n + m * rup4 + m // 32 * rup128},
        # Half a byte, a scale for 16: those of a row, padded to 4, or of all columns, padded to 128.
        "nvfp4": {"uint8": n + m * (-(-k // 16 // 4) * 4) + rup128 * (m // 16)},
        "rowwise": {"uint8": 2 * n, "float32": 4 * m},  # a column's scale is that of all tokens already
        "custom": {"uint8": 2 * n + m * rup4 + m // 32 * rup128},
    }[recipe]
    if mode == "row":
        return both
    return {
        "none": {"bfloat16": 4 * n},  # twice
        "delayed": {"uint8": 2 * n},  # the row-wise copy, twice
        "current": {"uint8": 2 * n},
        "custom": {"uint8": n // 2 + m * (-(-k // 16 // 4) * 4) + n + m // 32 * rup128},  # NVFP4, then MXFP8
    }.get(recipe, both)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_sent(two: World, recipe: str, mode: str) -> None:
    """Ranks send quantized bytes where the format allows it, sums in BF16, and few amaxes or one for each column.

    Before each of delayed scaling's two reductions they send one number, by which they compare the modules reduced."""
    m, k = unit(recipe), unit(recipe) * 2
    for found in results(two, "sent"):
        sent = dict(found[f"{recipe} {mode}"])
        assert sent.pop("reduce_scatter_tensor bfloat16") == 2 * (2 * m) * k
        # Row-wise scaling has one for each column of x and of the weight, and for each row of dy; or for each column of
        # dy, and for each row of x and of the weight. These have k rows: twice m tokens, and as many features.
        lines = 3 * k if recipe == "rowwise" else 8
        assert sent.pop("all_reduce float32", 0) <= 4 * lines
        assert sent.pop("all_gather_into_tensor int64", 0) == (16 if recipe == "delayed" else 0)
        assert sent == {f"all_gather_into_tensor {dtype}": size for dtype, size in gathered(recipe, mode).items()}


@pytest.mark.parametrize("kind", ["first", "second", "original", "late", "lean", "op"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", ["current", "nvfp4", "mxfp8"])
def test_options_change_the_way_only(two: World, recipe: str, mode: str, kind: str) -> None:
    for found in results(two, "options"):
        assert found[f"{recipe} {mode} {kind}"] == []


@pytest.mark.parametrize("recipe", ["current", "nvfp4", "mxfp8"])
def test_lean_memory_of_an_mlp(two: World, recipe: str) -> None:
    """Where ranks gather its input, or take amaxes together, forward's copy is held; elsewhere it is made again."""
    for found in results(two, "options"):
        assert found[f"{recipe} mlp"] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", KEPT)
def test_weights_that_are_kept_quantized(two: World, recipe: str, mode: str) -> None:
    """Their codes and scales are those of one process."""
    for found in results(two, "kept"):
        assert found[f"{recipe} {mode}"] == []


@pytest.mark.slow
def test_weights_that_four_keep_quantized(four: World) -> None:
    for found in results(four, "kept"):
        assert found == {f"{recipe} {mode}": [] for recipe in KEPT[:4] for mode in MODES}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_equals_eager(compiling: World, recipe: str) -> None:
    for found in results(compiling, "compiled"):
        assert found[recipe] == {"wrong": [], "graphs": 1, "breaks": 0}
