"""Questions about this machine: these functions say which formats run here and how, and what the default recipe and the
versions are.

`hw.py` has the table that the answers are read from.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol, overload

import torch

from mezzotint import hw
from mezzotint.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe


def get_default_recipe() -> Recipe:
    """Return the recipe that this machine runs best: MXFP8 if it is native, else FP8 with one scale per tensor.

    Returns:
        A new `MXFP8BlockScaling` on GPUs of compute capability 10.x and 11.x, a `Float8CurrentScaling` on later ones,
        and a `DelayedScaling` on earlier ones and on the CPU.

    Example:
        >>> import mezzotint as mz
        >>> isinstance(mz.get_default_recipe(), mz.recipe.Recipe)
        True
    """
    cc = hw.capability()
    if cc is not None and (10, 0) <= cc < (12, 0):
        return MXFP8BlockScaling()
    return Float8CurrentScaling() if cc is not None and cc >= (12, 0) else DelayedScaling()


class Gate(Protocol):
    """A `Gate` says whether a format runs here, natively or not; with `native`, if all products are the hardware's.

    With `return_reason`, it also says how the format runs, and what native products would need.
    """

    @overload
    def __call__(self, return_reason: Literal[False] = False, *, native: bool = False) -> bool: ...
    @overload
    def __call__(self, return_reason: Literal[True], *, native: bool = False) -> tuple[bool, str]: ...
    def __call__(self, return_reason: bool = False, *, native: bool = False) -> bool | tuple[bool, str]: ...


def _gate(name: str, function: str) -> Gate:
    def available(return_reason: bool = False, *, native: bool = False) -> Any:
        found, reason = hw.available(name, native=native)
        return (found, reason) if return_reason else found

    available.__doc__ = f"""Return whether {name} runs here, natively or emulated, also on a CPU.

    Args:
        return_reason: Return the reason as well: how the format runs here, or what is lacking. The default is False.
        native: Ask only whether this GPU multiplies the format in hardware, as the function of this name in
            Transformer Engine does. The default is False, which also accepts emulation.

    Returns:
        True or False, or with `return_reason` a pair of that and a text.

    Example:
        >>> import mezzotint as mz
        >>> runs, how = mz.{function}(return_reason=True)
        >>> runs, isinstance(how, str)
        (True, True)
    """
    return available


def _check(gate: Gate) -> Callable[[], tuple[bool, str]]:
    def check() -> tuple[bool, str]:
        return gate(True)

    check.__doc__ = "Return whether the format runs here, and how, or what is lacking: a pair of a bool and a text."
    return check


is_fp8_available = _gate("float8", "is_fp8_available")
is_mxfp8_available = _gate("mxfp8", "is_mxfp8_available")
is_fp8_block_scaling_available = _gate("float8_block", "is_fp8_block_scaling_available")
is_fp8_rowwise_available = _gate("float8_rowwise", "is_fp8_rowwise_available")
is_nvfp4_available = _gate("nvfp4", "is_nvfp4_available")
check_fp8_support = _check(is_fp8_available)
check_mxfp8_support = _check(is_mxfp8_available)
check_fp8_block_scaling_support = _check(is_fp8_block_scaling_available)
check_nvfp4_support = _check(is_nvfp4_available)


@overload
def is_bf16_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_bf16_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: BF16 runs on the CPU and on every GPU that this package runs on.

    Args:
        return_reason: Return the reason as well, which is empty. The default is False.

    Returns:
        True, or with `return_reason` the pair (True, "").

    Example:
        >>> import mezzotint as mz
        >>> mz.is_bf16_available(return_reason=True)
        (True, '')
    """
    return (True, "") if return_reason else True


def get_device_compute_capability() -> tuple[int, int]:
    """Return the compute capability of the current GPU.

    Returns:
        The pair (major, minor), or (0, 0) without a GPU.

    Example:
        >>> import mezzotint as mz
        >>> len(mz.get_device_compute_capability())
        2
    """
    return hw.capability() or (0, 0)


def get_cudnn_version() -> tuple[int, int, int]:
    """Return the version of the cuDNN that PyTorch has.

    Returns:
        The triple (major, minor, patch), or (0, 0, 0) without cuDNN.

    Example:
        >>> import mezzotint as mz
        >>> len(mz.get_cudnn_version())
        3
    """
    version = (torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None) or 0
    major, rest = divmod(version, 1000 if version < 90000 else 10000)
    return major, rest // 100, rest % 100


def is_non_tn_fp8_gemm_supported() -> bool:
    """Return whether the FP8 GEMM takes operands in either order, so that no transposed copy is needed."""
    cc = get_device_compute_capability()
    return (10, 0) <= cc < (12, 0) or cc >= (13, 0)
