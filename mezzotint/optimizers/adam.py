"""FusedAdam: it is Adam and AdamW for plain and quantized parameters, with masters and moments in FP32 or in fewer
bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from mezzotint.kernels._lib import run_op
from mezzotint.kernels.optimizer import Tensors, adam_
from mezzotint.optimizers.base import (
    FusedOptimizer,
    by_device,
    check_not_negative,
    in_fp32,
    is_own_master,
    learning_rate,
    like,
    local,
    loss_of,
    write_back,
)
from mezzotint.optimizers.states import (
    RANGES,
    STATE_DTYPES,
    Kept,
    decode_state,
    join_remainder,
    pack_,
    pack_all_,
    split_,
    unpack_all,
)
from mezzotint.tensor.quantized_tensor import QuantizedTensor


class FusedAdam(FusedOptimizer):
    """This optimizer is Adam or AdamW, computed in FP32, for plain and quantized parameters.

    The state of a parameter is `step`, FP32; `exp_avg` and `exp_avg_sq`; and with `master_weights` a `master_param`,
    unless the parameter is FP32 itself. States in FP16 and uint8 (FP8, E4M3) come with `…_scale`. Without masters the
    values of a parameter are rounded in every step. `state_dict()` has FP32 throughout, except remainders.

    Args:
        params: The parameters, or groups of parameters as dicts, as every optimizer of PyTorch takes them. They may be
            quantized.
        lr: The learning rate, a number or a tensor. The default is 1e-3.
        betas: The decays of the first and of the second moment. The default is (0.9, 0.999).
        eps: A small number that is added to the denominator. The default is 1e-8.
        weight_decay: The factor of the weight decay. The default is 0.
        amsgrad: It must be False.
        bias_correction: Whether the moments are divided by 1 - beta^step. The default is True.
        adam_w_mode: True (the default) for AdamW, whose weight decay does not go through the moments, False for Adam.
        capturable: Whether the learning rate becomes a tensor on the device, for CUDA graphs. The default is False.
        master_weights: Whether a copy of each parameter in higher precision is kept and updated, from which the
            parameter is rounded or quantized. The default is False.
        master_weight_dtype: The dtype of these copies, torch.float32 (the default) or torch.float16.
        exp_avg_dtype: The dtype of the first moment, by default torch.float32; torch.uint8 is FP8 with a scale.
        exp_avg_sq_dtype: The dtype of the second moment, likewise.
        use_decoupled_grad: Whether gradients are read from `param.decoupled_grad` instead of `param.grad`. The default
            is False.
        store_param_remainders: Whether only those bits of an FP32 master are kept that its BF16 parameter does not
            have. The default is False.
        set_grad_none: A former option that gives a DeprecationWarning: give `set_to_none` to `zero_grad` instead. The
            default is None.

    Raises:
        ValueError: If a rate is negative, a dtype is not one of those that there are, or options do not go together.
        RuntimeError: If `amsgrad` is True.

    Example:
        >>> import torch
        >>> import mezzotint as mz
        >>> with mz.quantized_model_init(recipe=mz.recipe.MXFP8BlockScaling()):
        ...     layer = mz.Linear(64, 64, device="cpu")
        >>> optimizer = mz.optimizers.FusedAdam(layer.parameters(), lr=1e-3, master_weights=True)
        >>> with mz.autocast("mxfp8"):
        ...     layer(torch.randn(32, 64)).sum().backward()
        >>> optimizer.step()
        >>> isinstance(layer.weight, mz.MXFP8Tensor), optimizer.state[layer.weight]["master_param"].dtype
        (True, torch.float32)
    """

    _OPTIONS = (
        *FusedOptimizer._OPTIONS,
        "adam_w_mode",
        "capturable",
        "master_weights",
        "name_to_dtype_map",
        "store_param_remainders",
        "use_decoupled_grad",
    )

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("amsgrad is True: FusedAdam does not have it; use torch.optim.AdamW(amsgrad=True)")
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas is {betas!r}: give two numbers from 0 up to, but not, 1")
        if master_weight_dtype not in (torch.float32, torch.float16):
            raise ValueError(f"master_weight_dtype is {master_weight_dtype}: give torch.float32 or torch.float16")
        for name, dtype in (("exp_avg_dtype", exp_avg_dtype), ("exp_avg_sq_dtype", exp_avg_sq_dtype)):
            if dtype not in STATE_DTYPES:
                raise ValueError(f"{name} is {dtype}: give one of {STATE_DTYPES}; torch.uint8 is FP8 with a scale")
        if store_param_remainders and not (master_weights and master_weight_dtype == torch.float32):
            raise ValueError(
                f"store_param_remainders is True with master_weights={master_weights} and master_weight_dtype="
                f"{master_weight_dtype}: a remainder is a part of an FP32 master; give True and torch.float32"
            )
        self.adam_w_mode = bool(adam_w_mode)
        self.capturable = bool(capturable)
        self.master_weights = bool(master_weights)
        self.use_decoupled_grad = bool(use_decoupled_grad)
        self.store_param_remainders = bool(store_param_remainders)
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        defaults = {
            "lr": lr,
            "bias_correction": bool(bias_correction),
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, set_grad_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._lr_as_tensor(self.param_groups[-1])

    def _lr_as_tensor(self, group: dict[str, Any]) -> None:
        if self.capturable and group["params"]:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)

    # State

    def _has_master(self, param: torch.Tensor) -> bool:
        return self.master_weights and not is_own_master(param)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool | None = None) -> None:
        """Set the moments to zero, and the master to the parameter's value. If `store_param_remainders` is None, a
        remainder is kept if the optimizer was told so."""
        if store_param_remainders is None:
            store_param_remainders = self.store_param_remainders
        self.state[param]["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in ("exp_avg", "exp_avg_sq"):
            self._allocate(param, name, self.name_to_dtype_map[name])
        mine = local(param)
        if not self._has_master(mine):
            return
        if store_param_remainders and mine.dtype == torch.bfloat16 and not isinstance(mine, QuantizedTensor):
            self._allocate(param, "master_param", torch.int16)  # 0: the master equals the parameter
        else:
            self._allocate(param, "master_param", self.name_to_dtype_map["master_param"])
            self.set_scaled_state(param, "master_param", in_fp32([mine])[0])

    def _allocate(self, param: torch.Tensor, name: str, dtype: torch.dtype) -> None:
        """Make a state of zeros, and a scale if the dtype has one."""
        state = self.state[param]
        state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)
        if dtype in RANGES:
            state[f"{name}_scale"] = torch.ones(1, dtype=torch.float32, device=param.device)

    @torch.no_grad()
    def get_unscaled_state(self, param: torch.Tensor, state_name: str, skip_unscale: bool = False) -> torch.Tensor:
        """Return `exp_avg`, `exp_avg_sq` or `master_param` in FP32; the kept tensor itself if that is FP32.

        With `skip_unscale` it is returned as it is kept.
        """
        state = self.state[param]
        mine = local(param)
        if state_name == "master_param" and not self._has_master(mine):
            return like(in_fp32([mine])[0].detach(), param)
        data = state[state_name]
        if skip_unscale or data.dtype == torch.float32:
            return data
        if data.dtype == torch.int16:
            return like(join_remainder(mine, local(data)), param)
        return like(decode_state(local(data), state.get(f"{state_name}_scale")), param)

    @torch.no_grad()
    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Store an FP32 value in the dtype that is kept. Where a remainder is kept, an int16 value is stored as it is,
        and an FP32 value is the master, which sets the parameter too."""
        if state_name not in self.name_to_dtype_map:
            raise ValueError(f"state_name is {state_name!r}: give one of {sorted(self.name_to_dtype_map)}")
        if state_name not in self.state[param]:
            self.initialize_state(param)
        state, mine, value = self.state[param], local(param), local(unscaled_state)
        if state_name not in state:
            raise ValueError(
                f"state_name is 'master_param': with master_weights={self.master_weights} a parameter of {param.dtype} "
                "has none; set the parameter itself, or give master_weights=True to the optimizer"
            )
        data = local(state[state_name])
        if value.shape != data.shape:
            raise ValueError(
                f"unscaled_state has shape {tuple(value.shape)}: {state_name} of this parameter has {tuple(data.shape)}"
            )
        value = value.to(data.device)
        if data.dtype != torch.int16:
            value = join_remainder(mine, value) if value.dtype == torch.int16 else value.float()
            pack_(data, state.get(f"{state_name}_scale"), value)
        elif value.dtype == torch.int16:
            data.copy_(value)
        else:
            split_(mine, data, value.float())

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict like torch.optim's, with states in FP32, whatever they are kept in, and remainders as
        they are."""
        saved = super().state_dict()
        indices = [i for group in saved["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(indices, params, strict=True):
            if param in self.state:
                saved["state"][index] = self._saved_state(param)
        return saved

    def _saved_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        saved = {}
        for name, value in self.state[param].items():
            if name in self.name_to_dtype_map:
                saved[name] = self.get_unscaled_state(param, name, skip_unscale=value.dtype == torch.int16)
            elif not name.endswith("_scale"):
                saved[name] = value
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, also for other dtypes of states, or what the Adam of torch.optim returned.

        A master that is missing is set to the parameter's value.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.pop("step", None)
            self._lr_as_tensor(group)
        for param, given in self._given_states(state_dict):
            if "exp_avg" in given:
                self._load_state(param, given)

    def _load_state(self, param: torch.Tensor, given: dict[str, Any]) -> None:
        unknown = given.keys() - {"step", *self.name_to_dtype_map}
        if unknown:
            raise ValueError(
                f"state_dict has {sorted(unknown)}: FusedAdam keeps step and {sorted(self.name_to_dtype_map)} alone"
            )
        self.state[param] = {}
        self.initialize_state(param)
        self.state[param]["step"].fill_(float(given.get("step", 0.0)))
        for name in given.keys() & self.name_to_dtype_map.keys():
            if name != "master_param" or not is_own_master(local(param)):
                self.set_scaled_state(param, name, given[name])

    # Step

    def _init_group(
        self,
        group: dict[str, Any],
        params: Tensors,
        grads: Tensors,
        steps: Tensors,
        exp_avgs: Tensors,
        exp_avg_scales: Tensors,
        exp_avg_sqs: Tensors,
        exp_avg_sq_scales: Tensors,
        masters: Tensors,
        master_scales: Tensors,
    ) -> None:
        """Collect what a step of the group reads and writes into lists of one length, which stay empty if there is
        nothing.

        The compiler runs a method of this name, and does not trace it.
        """
        for param in group["params"]:
            grad = self._gradient(param)
            if grad is None:
                continue
            if len(self.state[param]) == 0:
                self.initialize_state(param)
            state = self.state[param]
            params.append(local(param))
            grads.append(grad)
            steps.append(state["step"])
            kept = ((exp_avgs, exp_avg_scales), (exp_avg_sqs, exp_avg_sq_scales), (masters, master_scales))
            for (name, dtype), (data, scales) in zip(self.name_to_dtype_map.items(), kept, strict=True):
                if name == "master_param" and not self.master_weights:
                    continue
                data.append(local(state.get(name, param)))
                if dtype in RANGES:
                    scales.append(state.get(f"{name}_scale", state["step"]))  # a placeholder if it has no scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """Update every parameter that has a gradient once, and return the closure's loss.

        With `grad_scaler` (torch.amp.GradScaler) gradients are divided by its scale, unless it has done so already, and
        if one of them is infinite or NaN nothing changes; the host does not wait to know.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            params: Tensors = []
            grads: Tensors = []
            steps: Tensors = []
            ms: Tensors = []
            m_scales: Tensors = []
            vs: Tensors = []
            v_scales: Tensors = []
            masters: Tensors = []
            scales: Tensors = []
            self._init_group(group, params, grads, steps, ms, m_scales, vs, v_scales, masters, scales)
            for at in by_device(params):
                self._step_device(
                    group,
                    grad_scaler,
                    [params[i] for i in at],
                    [grads[i] for i in at],
                    [steps[i] for i in at],
                    [(ms[i], m_scales[i] if m_scales else None) for i in at],
                    [(vs[i], v_scales[i] if v_scales else None) for i in at],
                    [(masters[i], scales[i] if scales else None) for i in at] if masters else [],
                )
        return loss

    def _step_device(
        self,
        group: dict[str, Any],
        grad_scaler: Any,
        params: Tensors,
        grads: Tensors,
        steps: Tensors,
        exp_avgs: list[Kept],
        exp_avg_sqs: list[Kept],
        masters: list[Kept],
    ) -> None:
        """Update the parameters of one device: unpack their states, compute in FP32, and pack them."""
        found_inf, grads = self._scaled_gradients(grad_scaler, in_fp32(grads))
        ms, vs = unpack_all(exp_avgs), unpack_all(exp_avg_sqs)
        values = self._master_values(params, masters) if masters else in_fp32(params)
        torch._foreach_add_(steps, 1.0 if found_inf is None else (1.0 - found_inf).view(()))
        lr, lr_value = learning_rate(group["lr"], params[0].device)
        rates = (lr_value, *group["betas"], group["eps"], group["weight_decay"])
        flags = (self.adam_w_mode, group["bias_correction"])
        run_op(adam_, values, grads, ms, vs, steps, lr, found_inf, *rates, *flags)
        pack_all_(exp_avgs, ms)
        pack_all_(exp_avg_sqs, vs)
        if masters:
            self._keep_masters(params, masters, values)
        rest = [i for i in range(len(params)) if not masters or masters[i][0].dtype != torch.int16]
        write_back([params[i] for i in rest], [values[i] for i in rest], found_inf)

    def _master_values(self, params: Tensors, masters: list[Kept]) -> Tensors:
        values = []
        for param, (master, scale) in zip(params, masters, strict=True):
            if not self._has_master(param):
                values.append(param)
            else:
                values.append(
                    join_remainder(param, master) if master.dtype == torch.int16 else decode_state(master, scale)
                )
        return values

    def _keep_masters(self, params: Tensors, masters: list[Kept], values: Tensors) -> None:
        for param, (master, scale), value in zip(params, masters, values, strict=True):
            if master.dtype == torch.int16:
                split_(param, master, value)
            elif self._has_master(param) and master.dtype != torch.float32:
                pack_(master, scale, value)

    def _scaled_gradients(self, grad_scaler: Any, grads: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        """Return whether a gradient is not finite, FP32 [1], and the gradients divided by the scaler's scale."""
        if grad_scaler is None or not grad_scaler.is_enabled():
            return None, grads
        if self.use_decoupled_grad:
            raise ValueError("grad_scaler is given: it looks at .grad, and use_decoupled_grad is True; unscale before")
        optimizer_state = grad_scaler._per_optimizer_states[id(self)]
        is_unscaled = optimizer_state["stage"] is OptState.UNSCALED
        found = optimizer_state["found_inf_per_device"] or grad_scaler._check_inf_per_device(self)
        found_inf = found[grads[0].device].float().view(1)
        if is_unscaled:
            return found_inf, grads
        scale = grad_scaler._get_scale_async().to(grads[0].device)
        return found_inf, list(torch._foreach_div(grads, scale))
