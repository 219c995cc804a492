"""The tuning of launch configurations: one that is replaced is so wherever it is called."""

from bench import _tune


def test_a_configuration_is_replaced_where_it_is_imported() -> None:
    from mezzotint.kernels.triton import _jit_float8, float8

    seen: _tune.Overrides = {}
    before = float8.tile_config
    assert before is _jit_float8.tile_config
    with _tune.replaced({"_jit_float8.flat_config": {"BLOCK": 1}}, seen):
        assert float8.flat_config() == {"BLOCK": 1}
        assert float8.tile_config(True) == before(True)
    assert seen == {"_jit_float8.flat_config": {"BLOCK": 1}, "_jit_float8.tile_config": before(True)}
    assert float8.tile_config is before
