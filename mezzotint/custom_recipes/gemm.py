"""The arguments of a user's own GEMM: a quantizer with `custom = True` gets these in its `qgemm`."""

from mezzotint.functional.gemm import CustomGemmParams as MMParams
from mezzotint.functional.gemm import GEMMType

__all__ = ["GEMMType", "MMParams"]
