"""Making parameters: this module resolves devices and dtypes, draws initial values, and checks the arguments of
modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from mezzotint.comm.groups import shard_size

DEFAULT_INIT_STD = 0.023

# A function that makes a shared parameter out of a whole one: it is given the parameter, the dimension to split along,
# or None to keep it whole, and how many weights it holds, one below the other, each of which is split.
PlaceParameter = Callable[[nn.Parameter, int | None, int], nn.Parameter]


def default_init(weight: torch.Tensor) -> torch.Tensor:
    """Draw a weight from normal(0, 0.023), in place."""
    return nn.init.normal_(weight, mean=0.0, std=DEFAULT_INIT_STD)


def resolve_device(device: Any) -> torch.device:
    """Return the device that was given; else the default device, or the GPU if that is the CPU and there is a GPU."""
    if device is not None:
        return torch.device(device)
    default = torch.get_default_device()
    return torch.device("cuda") if default.type == "cpu" and torch.cuda.is_available() else default


def resolve_dtype(params_dtype: torch.dtype | None, dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of parameters: as given, by upstream's name `params_dtype` or by torch's `dtype`, else torch's
    default."""
    if params_dtype is not None and dtype is not None and params_dtype != dtype:
        raise ValueError(f"params_dtype is {params_dtype}, dtype {dtype}: they are two names of one thing; give one")
    chosen = dtype if params_dtype is None else params_dtype
    return torch.get_default_dtype() if chosen is None else chosen


def check_features(**sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}: give a positive int")


def check_module_input(inp: Any, features: int, name: str = "inp") -> None:
    """Check that the input is a tensor whose last dimension the module takes."""
    if not isinstance(inp, torch.Tensor):
        raise TypeError(f"{name} is {type(inp).__name__}: give a torch.Tensor")
    if inp.dim() < 1 or inp.shape[-1] != features:
        raise ValueError(f"{name} has shape {tuple(inp.shape)}: its last dimension must be {features}")


def check_parallel(parallel_mode: str | None, **userbuffers: Any) -> None:
    """Raise if `parallel_mode` is unknown, or if userbuffers are asked for, which are not there."""
    if parallel_mode not in (None, "column", "row"):
        raise ValueError(f"parallel_mode is {parallel_mode!r}: give None, 'column' or 'row'")
    for name, value in userbuffers.items():
        if value:
            raise NotImplementedError(
                f"{name}={value!r}: there are no CUDA userbuffers here; leave it off. Collectives of modules are "
                "PyTorch's functional ones, of which torch.compile sees all (mezzotint/compat/userbuffers.py)"
            )


def local_features(parallel_mode: str | None, tp_size: int, in_features: int, out_features: int) -> tuple[int, int]:
    """Return (in, out), the numbers of features that this rank has."""
    if parallel_mode == "row":
        return shard_size("in_features", in_features, tp_size), out_features
    return in_features, shard_size("out_features", out_features, tp_size) if parallel_mode == "column" else out_features


def split_names(parameters_split: Any, features: int) -> dict[str, int]:
    """Return the number of rows of each named part of a parameter; {} if it has only one part."""
    if not parameters_split:
        return {}
    if isinstance(parameters_split, str):
        raise TypeError(f"parameters_split is {parameters_split!r}: give a tuple of names or a dict of names and sizes")
    if isinstance(parameters_split, dict):
        sizes = dict(parameters_split)
        check_features(**{f"parameters_split[{name!r}]": size for name, size in sizes.items()})
    else:
        names = list(parameters_split)
        if features % len(names):
            raise ValueError(
                f"parameters_split has {len(names)} names for {features} features: give a dict of sizes that add up"
            )
        sizes = {name: features // len(names) for name in names}
    if sum(sizes.values()) != features:
        raise ValueError(f"parameters_split is {sizes}: the sizes must add up to {features}")
    return {name.removesuffix("_"): size for name, size in sizes.items()}


@contextmanager
def forked_rng(tracker: Callable[[], Any] | None, name: str | None) -> Iterator[None]:
    """Yield with the tracker's generator in force, so that initial values come from it; without a tracker nothing
    changes."""
    with nullcontext() if tracker is None else tracker().fork(*([] if name is None else [name])):
        yield


class _InitialValue:
    """An `_InitialValue` holds the initial value of a parameter, which gets its bound methods: so a copy of the
    parameter has a copy of the value."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value: torch.Tensor | None = value

    def get(self) -> torch.Tensor | None:
        return self.value

    def clear(self) -> None:
        self.value = None


def high_precision_init(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Keep the initial values of a quantized parameter on the CPU, and give it the two methods that return and drop
    them."""
    held = _InitialValue(value.detach().cpu())
    parameter.get_high_precision_init_val = held.get  # type: ignore[attr-defined]
    parameter.clear_high_precision_init_val = held.clear  # type: ignore[attr-defined]


def attributes_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what users put on parameters (main_grad, tensor_model_parallel, …), by parameter name."""
    return {name: dict(vars(p)) for name, p in module._parameters.items() if p is not None and vars(p)}


def restore_attributes(module: nn.Module, attributes: dict[str, dict[str, Any]]) -> None:
    """Put attributes that `attributes_of` returned back on parameters that a conversion replaced."""
    for name, values in attributes.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        for key, value in values.items():
            if key not in vars(parameter) and not key.startswith("_"):
                is_elsewhere = isinstance(value, torch.Tensor) and value.device != parameter.device
                setattr(parameter, key, value.to(parameter.device) if is_elsewhere else value)


def replace_parameter(module: nn.Module, name: str, value: torch.Tensor) -> nn.Parameter:
    """Put another tensor in the place of a parameter, with what users have put on the old one, and return the new
    parameter."""
    old = getattr(module, name)
    attributes, made = {name: dict(vars(old))}, nn.Parameter(value, old.requires_grad)
    setattr(module, name, made)
    restore_attributes(module, attributes)
    return made
