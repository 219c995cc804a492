"""Names of Transformer Engine's userbuffers, CUDA memory that GEMMs and collectives share: there are none here.

PyTorch has what they are for, communication that overlaps with products. Functional collectives do it, which
`mezzotint.comm.collectives` starts before and waits for after what is computed in between, and so does
symmetric memory, which `torch.compile` can put under them (`torch._inductor.config._micro_pipeline_tp`; not
tried with our collectives).
"""

from enum import Enum
from typing import Any

import torch


class UserBufferQuantizationMode(Enum):
    """This enumeration says what one of Transformer Engine's user buffers would hold. There are none here.

    Example:
        >>> import mezzotint as mz
        >>> mz.UserBufferQuantizationMode("fp8").name
        'FP8'
    """

    NONE = "none"
    FP8 = "fp8"


def initialize_ub(
    shape: Any,
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Any = None,
    bootstrap_backend: Any = None,
    with_cublasmp: bool = False,
) -> None:
    """Raise an error: without one, Transformer Engine's user buffers would seem to be there, and nothing would overlap.

    Args:
        shape: It is accepted and not read.
        tp_size: It is accepted and not read.
        use_fp8: It is accepted and not read.
        quantization_modes: It is accepted and not read.
        dtype: It is accepted and not read.
        ub_cfgs: It is accepted and not read.
        bootstrap_backend: It is accepted and not read.
        with_cublasmp: It is accepted and not read.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "initialize_ub: there are no CUDA userbuffers here. Leave the call and the ub_… options out: collectives of "
        "modules are functional ones, which torch.compile overlaps, with symmetric memory where it is set up "
        "(torch.distributed._symmetric_memory.enable_symm_mem_for_group)"
    )


def destroy_ub() -> None:
    """Do nothing: there are no user buffers to free.

    Example:
        >>> import mezzotint as mz
        >>> mz.destroy_ub()
    """
