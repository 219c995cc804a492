"""Mezzotint provides this `transformer_engine`: `mezzotint.as_transformer_engine` makes what is in it."""

__provided_by__ = "mezzotint"

import mezzotint.as_transformer_engine  # noqa: F401
