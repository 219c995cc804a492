"""Whether somebody looks at what goes into a module and comes out of it: then it must be what the module says."""

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def is_hooked(*modules: nn.Module) -> bool:
    """Whether one of them has a hook, forward or backward, or all modules have."""
    return _has_any_global_hook() or any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in modules
    )
