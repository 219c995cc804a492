"""A check for hooks: if somebody looks at what goes into a module and comes out of it, those tensors must be what the
module documents."""

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def is_hooked(*modules: nn.Module) -> bool:
    """Return whether one of these modules has a forward or backward hook, or there is a global hook of all modules."""
    return _has_any_global_hook() or any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in modules
    )
