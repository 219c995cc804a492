"""Three gaps in how Dynamo traces value-opaque objects, closed for quantizers (seen in torch 2.11, 2.13 and 2.15).

`q(x)` dies in an internal assertion, because the variable of an opaque object forgets the source of its class; and a
method of an opaque object that was made inside the graph becomes a graph node instead of being traced, which fails
for a method that gives a quantized tensor. In both cases the method is there, in plain Python: we have Dynamo inline
it. And 2.11 cannot give back an object, like a storage, that holds an opaque one which was made inside the graph.

The functions are put in place when Dynamo's module is loaded.
"""

from types import ModuleType
from typing import Any

from mezzotint.dynamo.late import after_import
from mezzotint.tensor.quantizer import Quantizer

_MODULE = "torch._dynamo.variables.script_object"
# As torch 2.15 calls them, and as those before it do.
_VARIABLES = ("CustomClassObjectVariable", "TorchScriptObjectVariable")
_GETATTRS = ("tp_getattro_impl", "var_getattr")


def trace_quantizer_methods(inlined: frozenset[str]) -> None:
    """Have Dynamo trace these methods of quantizers wherever the quantizer comes from."""

    def close(module: ModuleType) -> None:
        for name in _VARIABLES:
            if hasattr(module, name):
                _close_gaps(getattr(module, name), inlined)
                break

    after_import(_MODULE, close)


def _close_gaps(variable: Any, inlined: frozenset[str]) -> None:
    getattr_name = next(name for name in _GETATTRS if hasattr(variable, name))
    call_function, reconstruct = variable.call_function, variable.reconstruct
    var_getattr = getattr(variable, getattr_name)

    def is_quantizer(self: Any) -> bool:
        # Not as_python_constant(), which raises for opaque objects that are no values.
        return isinstance(getattr(self.value, "real_obj", self.value), Quantizer)

    def inline(self: Any, name: str, tx: Any, args: Any, kwargs: Any) -> Any:
        from torch._dynamo.variables.functions import UserFunctionVariable

        function = UserFunctionVariable(getattr(type(self.as_python_constant()), name))
        return function.call_function(tx, [self, *args], kwargs)

    def traced_call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if is_quantizer(self):
            return inline(self, "__call__", tx, args, kwargs)
        return call_function(self, tx, args, kwargs)

    def traced_getattr(self: Any, tx: Any, name: str) -> Any:
        from torch._dynamo.variables.misc import LambdaVariable

        if self.source is None and name in inlined and is_quantizer(self):
            return LambdaVariable(lambda *args, **kwargs: inline(self, name, tx, args, kwargs))
        return var_getattr(self, tx, name)

    def traced_reconstruct(self: Any, codegen: Any) -> None:
        try:
            reconstruct(self, codegen)
        except NotImplementedError:  # torch 2.11
            if not is_quantizer(self):
                raise
            name = codegen.tx.output.install_global_by_id("__mezzotint_quantizer", self.as_python_constant())
            codegen.append_output(codegen.create_load_global(name, add=True))

    variable.call_function, variable.reconstruct = traced_call, traced_reconstruct
    setattr(variable, getattr_name, traced_getattr)
