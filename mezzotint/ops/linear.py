"""ops.Linear: it is a linear with a bias, as operations that can be fused with their neighbours."""

from collections.abc import Callable
from typing import Any

import torch

from mezzotint.ops.basic.basic_linear import BasicLinear
from mezzotint.ops.basic.bias import Bias
from mezzotint.ops.fused_operation import FusedOperation
from mezzotint.ops.op import BasicOperation
from mezzotint.tensor.printing import formats_of


class Linear(FusedOperation):
    """This operation computes x · `weight`ᵀ + `bias`, quantized as the recipe in force says.

    It is made of a `BasicLinear` and a `Bias`, which is split with the rows of the weight. Its state dict has the keys
    of `torch.nn.Linear`.

    Args:
        in_features: The number of features of the input, over all ranks.
        out_features: The number of features of the output, over all ranks.
        bias: Whether there is a bias. The default is True.
        device: The device of the parameters. None means PyTorch's default device, or the GPU if that is the CPU and
            there is a GPU.
        dtype: The dtype of the parameters, or None for PyTorch's default dtype.
        tensor_parallel_mode: How the weight is split over ranks: "column" splits the output features, "row" the input
            features, and None (the default) nothing.
        tensor_parallel_group: The process group whose ranks share the weight. None means all ranks if there is a
            `tensor_parallel_mode`.
        sequence_parallel: Whether the first dimension of the tensors outside of the split weights is divided over these
            ranks as well. The default is False.
        rng_state_tracker_function: A function without arguments that returns a `CudaRNGStatesTracker`, from whose
            random numbers initial values are drawn, or None for PyTorch's own.
        accumulate_into_main_grad: Whether backward adds the weight gradient to `weight.main_grad`, a tensor that the
            training program puts there, instead of returning it to autograd. The default is False.

    Raises:
        ValueError: If a size is not positive, does not divide over the ranks, or the mode is unknown.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> linear = mz.ops.Linear(64, 32, device="cpu")
        >>> with mz.autocast("mxfp8"):
        ...     y = linear(torch.randn(32, 64))
        >>> y.shape
        torch.Size([32, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        linear = BasicLinear(
            in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        ops: list[BasicOperation] = [linear]
        if bias:
            is_split = tensor_parallel_mode == "column"
            group = linear.tensor_parallel_group
            ops.append(
                Bias(out_features, device=device, dtype=dtype, tensor_parallel=is_split, tensor_parallel_group=group)
            )
            if tensor_parallel_mode == "row":
                ops[1].bias.sequence_parallel = linear.sequence_parallel  # type: ignore[union-attr]
        super().__init__(ops)
        self.in_features, self.out_features = in_features, out_features
        self.register_state_dict_post_hook(_to_linear_keys)
        self.register_load_state_dict_pre_hook(_from_linear_keys)
        self.register_load_state_dict_post_hook(_name_linear_keys)

    @property
    def weight(self) -> torch.Tensor:
        return self.basic_ops[0].weight  # type: ignore[return-value]

    @weight.setter
    def weight(self, value: Any) -> None:
        self.basic_ops[0].weight = value

    @property
    def bias(self) -> torch.Tensor | None:
        return self.basic_ops[1].bias if len(self.basic_ops) > 1 else None  # type: ignore[return-value]

    @bias.setter
    def bias(self, value: Any) -> None:
        if len(self.basic_ops) < 2:
            raise ValueError("bias: this Linear was made with bias=False")
        self.basic_ops[1].bias = value

    def register_parameter(self, name: str, param: Any) -> None:
        """Register a parameter. The assignment of one comes here too, because torch does not ask a property about
        it."""
        if name in ("weight", "bias"):
            object.__setattr__(self, name, param)
        else:
            super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Set the initial values."""
        for op in self.basic_ops:
            op.reset_parameters()  # type: ignore[operator]

    def extra_repr(self) -> str:
        bias, quantized = self.bias is not None, formats_of(self.parameters())
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}{quantized}"


_KEYS = {"basic_ops.0.weight": "weight", "basic_ops.1.bias": "bias", "basic_ops.0._extra_state": "_extra_state"}


def _to_linear_keys(module: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    for inner, outer in _KEYS.items():
        if prefix + inner in state_dict:
            state_dict[prefix + outer] = state_dict.pop(prefix + inner)


def _from_linear_keys(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
    for inner, outer in _KEYS.items():
        if prefix + outer in state_dict:
            state_dict[prefix + inner] = state_dict.pop(prefix + outer)


def _name_linear_keys(module: Any, incompatible: Any) -> None:
    """Rename missing and unexpected keys to the names under which a state dict has them."""
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        for i, key in enumerate(keys):
            for inner, outer in _KEYS.items():
                if key == inner or key.endswith("." + inner):
                    keys[i] = key[: len(key) - len(inner)] + outer
