"""Mezzotint under the names of Transformer Engine, so that a program that imports `transformer_engine` runs unchanged.

    python -m mezzotint.as_transformer_engine train.py --steps 100     one program
    import mezzotint.as_transformer_engine                             the process that imports it, from there on

Afterwards `transformer_engine.pytorch`, `transformer_engine.common.recipe`, `transformer_engine_torch` and the other
paths of `paths.py` can be imported, and have Mezzotint's objects. `transformer_engine.__version__` is the version of
Transformer Engine whose names they are, and `transformer_engine.__provided_by__` says that they are Mezzotint's. A name
that Transformer Engine has and Mezzotint lacks can be imported as well; using it raises an error that says what to do.

Processes that a program starts afresh (`multiprocessing` with "spawn") begin without it: they must import this module
as well, or the distribution in `packages/transformer-engine-shim` must be installed, which does the same for every
program. `torchrun` takes `-m mezzotint.as_transformer_engine train.py`.
"""

from mezzotint.as_transformer_engine.modules import install

install()
