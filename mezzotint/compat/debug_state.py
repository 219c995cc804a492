"""TEDebugState is the switch of Transformer Engine's debugging tool, which is off here and cannot be turned on.

PyTorch's hooks show what modules compute, and `tensor.get_usages()` and `dequantize()` show quantization.
"""

from typing import ClassVar


class TEDebugState:
    """This is the state of the debugging tool, which is never enabled."""

    layer_count: ClassVar[int] = 1
    layers_initialized: ClassVar[dict[str, bool]] = {}
    weight_tensor_tp_group_reduce: ClassVar[bool] = True
    debug_enabled: ClassVar[bool] = False

    @classmethod
    def initialize(cls) -> None:
        """Do nothing: there is no tool to find."""

    @classmethod
    def get_layer_count(cls) -> int:
        """Return a number for a layer without a name; the next call returns the next one."""
        number, cls.layer_count = cls.layer_count, cls.layer_count + 1
        return number

    @classmethod
    def set_weight_tensor_tp_group_reduce(cls, enabled: bool) -> None:
        """Keep the value; nothing reads it."""
        cls.weight_tensor_tp_group_reduce = enabled

    @classmethod
    def get_iteration(cls) -> int:
        """Return 0: no tool counts iterations."""
        return 0

    @classmethod
    def _reset(cls) -> None:
        cls.layer_count = 1
        cls.layers_initialized.clear()


def set_weight_tensor_tp_group_reduce(enabled: bool) -> None:
    """Keep the value; nothing reads it."""
    TEDebugState.set_weight_tensor_tp_group_reduce(enabled)
