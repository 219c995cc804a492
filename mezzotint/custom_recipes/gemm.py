"""What a user's quantizer with `custom = True` and a `qgemm` of its own is told."""

from mezzotint.functional.gemm import CustomGemmParams as MMParams
from mezzotint.functional.gemm import GEMMType

__all__ = ["GEMMType", "MMParams"]
