"""The state of a run: this module has its model, its optimizer and its data, and runs one step.

What a run computes follows from its configuration alone: a run that is resumed makes the numbers of one that was never
interrupted, bit for bit on a CPU with the same versions and threads.

Each of several ranks has its shard of the model (`mesh.py`), and each replica its share of a batch. All begin with the
weights of a run on one rank: each makes the whole model and keeps its shard.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mezzotint.comm.collectives import all_reduce
from mezzotint.comm.groups import rank_in, world_size
from mezzotint.layer.bind import bind_rules
from mezzotint.quantization import autocast
from mezzotint.recipe import Recipe
from mezzotint.trainer.clipping import clip_gradients
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.data import Batches, Text, draw_seed, hold_out
from mezzotint.trainer.expert_parts import find_numbered_placements
from mezzotint.trainer.local_checkpoint import (
    DELAYED,
    Checkpoint,
    as_damaged,
    check_fits,
    check_place,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from mezzotint.trainer.machine import check_compiler, find_device
from mezzotint.trainer.manifest import SEVERAL, About
from mezzotint.trainer.mesh import Meshes, make_meshes, make_model, reduce_over_meshes
from mezzotint.trainer.model import LanguageModel
from mezzotint.trainer.recipes import schedule_of
from mezzotint.trainer.settings import RunConfig
from mezzotint.trainer.shared_checkpoint import load_into, read_stored, save_shared, start_state, state_of
from mezzotint.trainer.world import ONE_RANK_WORLD, World, together

BETAS = (0.9, 0.95)


class Training:
    """A `Training` is a run after `step` steps, or this rank's share of it."""

    def __init__(self, config: RunConfig, text: Text, world: World = ONE_RANK_WORLD) -> None:
        self.config, self.world, self.step = config, world, 0
        train, layout = config.train, config.layout
        if train.compile and config.model.experts:
            raise CommandError("--experts: how many rows an expert gets is known when it runs; give --no-compile")
        if train.sample and layout.tp > 1:
            raise CommandError(
                "--sample: with --tp no rank has a whole logit; leave it out, or sample when resumed alone"
            )
        layout.check_model(config.model)
        self.device = find_device(train.device)
        self.schedule = schedule_of(train)
        self.meshes = make_meshes(layout, self.device.type) if layout.world > 1 else None
        self.replica, self.replicas = 0, 1
        if self.meshes is not None:
            self.replica, self.replicas = rank_in(self.meshes.replica_group), world_size(self.meshes.replica_group)
        self.text, self.held_out = hold_out(text, train.hold_out)
        self.batches = self.make_batches(self.text)
        if train.hold_out:
            self.make_batches(self.held_out)  # raises an error if it is too short
        self.losses = torch.zeros(train.steps, device=self.device)
        self.norms = torch.zeros(train.steps, device=self.device)  # of gradients, and not those of before a resume
        torch.manual_seed(train.seed)
        whole = _make_whole(config, world)  # on the CPU, for the same weights everywhere
        self.whole = {name: torch.empty_like(value, device="meta") for name, value in whole.named_parameters()}
        self.model = whole.to(self.device) if self.meshes is None else self._make_part(whole, self.meshes)
        self._bind()
        self.places = find_numbered_placements(self.model)
        self.call: Any = self.model
        if train.compile:
            self._compile()
        self.optimizer = _make_optimizer(self.model, train.lr, train.weight_decay)

    def make_batches(self, text: Text) -> Batches:
        """Return this replica's batches of a text, from the beginning."""
        sizes, seed = (self.config.model.sequence, self.config.model.batch), self.config.train.seed
        return Batches(text, *sizes, seed, replica=self.replica, replicas=self.replicas)

    def _make_part(self, whole: LanguageModel, meshes: Meshes) -> LanguageModel:
        config, layout = self.config.model, self.config.layout
        # Under a schedule of several recipes weights are gathered in high precision, as no one recipe fits all steps.
        recipe = self.recipe if len(self.schedule.phases) == 1 else None
        model = make_model(config, layout, meshes, recipe, device=self.device)
        places = find_numbered_placements(model)
        for name, parameter in model.named_parameters():
            places[name].copy_whole(parameter, whole.get_parameter(places[name].name))
        torch.manual_seed(draw_seed(self.config.train.seed, 0, self.world.rank))  # for stochastic rounding
        return model

    def _bind(self) -> None:
        for rules in self.schedule.rules():
            try:
                bind_rules(self.model, rules)
            except ValueError as error:
                raise CommandError(f"--rules: {error}") from None

    def _compile(self) -> None:
        check_compiler(self.device)
        torch.compiler.reset()  # runs share the model's code, and the graphs of one function are limited
        if not self.config.layout.fsdp:
            self.call = torch.compile(self.model, fullgraph=True)
            return
        for layer in self.model.layers:  # between them weights are gathered, outside of any graph
            layer.compile(fullgraph=True)

    @property
    def recipe(self) -> Recipe | None:
        """Return the recipe of the next step, or None for BF16."""
        return self.schedule.at(self.step)

    @property
    def tokens_per_step(self) -> int:
        return self.config.model.batch * self.config.model.sequence * self.config.train.accumulate * self.replicas

    def run_step(self) -> None:
        """Run forward and backward of each microbatch, and the optimizer's step."""
        train = self.config.train
        for group in self.optimizer.param_groups:
            group["lr"] = train.learning_rate(self.step)
        total = torch.zeros((), device=self.device)
        # Amaxes are reduced over all ranks, so that delayed scaling has the same state on each of them, in any layout.
        everyone = None if self.meshes is None else dist.group.WORLD
        for micro in range(train.accumulate):
            tokens, targets = self._next_batch()
            # Weights change once a step, so later microbatches use the quantized weights of the first.
            is_first = None if train.accumulate == 1 else micro == 0
            with autocast(**self.schedule.region(self.step), amax_reduction_group=everyone, memory=train.memory):
                loss = self.call(tokens, targets, is_first_microbatch=is_first)
            # Backward runs in this thread: autograd's thread for a device runs Python slowly (docs/performance.md).
            with torch.autograd.set_multithreading_enabled(False):
                (loss / train.accumulate).backward()
            total += loss.detach() / train.accumulate
        limit = train.clip or math.inf
        if self.meshes is None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        else:
            reduce_over_meshes(self.model, self.config.layout, self.meshes)
            norm = clip_gradients(self.model, self.meshes, limit)
            total = all_reduce(total, self.meshes.replica_group) / self.replicas
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[self.step], self.norms[self.step] = total, norm
        self.step += 1

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch on the device, copied from pinned memory: a copy from any other would wait for all
        that the GPU still has to do."""
        tokens, targets = self.batches.next()
        if self.device.type == "cuda":
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        return tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    # Checkpoints

    def save(self, run: Path) -> None:
        """Write everything that the next step depends on; all ranks call it."""
        keep = self.config.train.keep
        if self.meshes is None:
            save_checkpoint(run, self.take(), keep)
            return
        state = state_of(self.model, self.optimizer, self.places)
        state.update({name: value for name, value in self.model.state_dict().items() if name.endswith(DELAYED)})
        state.update({f"{self._rng_prefix}{name}": value for name, value in self._rng().items()})
        state.update(losses=self.losses[: self.step].clone(), position=torch.tensor(self.batches.position))
        save_shared(self.world, run, self.step, self.config.as_json(), state, keep)

    def load(self, path: Path, check: Callable[[Mapping[str, Any]], None]) -> None:
        """Go on from a checkpoint, of one rank or of several; `check` is called with its configuration first."""
        about = together(self.world, lambda: open_checkpoint(path, self.world.rank, self.world.size))
        together(self.world, lambda: check(about.config))
        steps, before = self.config.train.steps, RunConfig.from_json(about.config).train.steps
        if not 1 <= about.step <= before:
            raise as_damaged(path, ValueError(f"it is of step {about.step}, of a run of {before}"))
        if about.step > steps:
            raise CommandError(f"--steps is {steps}: the run has {about.step} already; give as many or more")
        if about.kind == SEVERAL:
            self._load_shared(path, about)
            return
        checkpoint = together(self.world, lambda: load_checkpoint(path, about))
        together(self.world, lambda: self.restore(checkpoint, path))

    def _load_shared(self, path: Path, about: About) -> None:
        metadata = together(self.world, lambda: read_stored(path, about))
        stored: Mapping[str, Any] = metadata.state_dict_metadata
        wanted = [name for name in stored if name.startswith(self._rng_prefix)]
        # With another --ep a rank has another number of experts, whose scales begin anew.
        has_experts = RunConfig.from_json(about.config).layout.ep == self.config.layout.ep
        wanted += [name for name in stored if name.endswith(DELAYED) and (has_experts or ".experts." not in name)]
        more = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in wanted}
        more |= {"losses": torch.empty(about.step), "position": torch.tensor(0)}
        load_into(path, {**state_of(self.model, self.optimizer, self.places), **more}, metadata)
        rng = {name.removeprefix(self._rng_prefix): more[name] for name in more if name.startswith(self._rng_prefix)}
        together(self.world, lambda: self._go_on(path, about.step, more["losses"], int(more["position"]), rng, more))

    def take(self) -> Checkpoint:
        """Return everything that the next step depends on, for a run on one rank."""
        return Checkpoint(
            step=self.step,
            config=self.config.as_json(),
            model=self.model.state_dict(),
            optimizer={
                name: start_state(self.optimizer, parameter) for name, parameter in self.model.named_parameters()
            },
            rng=self._rng(),
            losses=self.losses[: self.step].clone(),
            position=self.batches.position,
        )

    def restore(self, checkpoint: Checkpoint, path: Path) -> None:
        """Go on from what `take` returned, on one rank or on each of several; `path` is where it lies, for messages."""
        try:
            check_fits(checkpoint, self.whole)
        except ValueError as error:
            raise as_damaged(path, error) from None
        for name, parameter in self.model.named_parameters():
            place = self.places[name]
            place.copy_whole(parameter, checkpoint.model[place.name])
            saved = checkpoint.optimizer[place.name]
            for key, value in start_state(self.optimizer, parameter).items():
                if value.dim():
                    place.copy_whole(value, saved[key])
                else:
                    value.copy_(saved[key])
        has_experts = self.config.layout.ep == 1
        learnt = {k: v for k, v in checkpoint.model.items() if has_experts or ".experts." not in k}
        rng = checkpoint.rng if self.world.is_first else {}
        self._go_on(path, checkpoint.step, checkpoint.losses, checkpoint.position, rng, learnt)

    def _go_on(
        self,
        path: Path,
        step: int,
        losses: torch.Tensor,
        position: int,
        rng: Mapping[str, torch.Tensor],
        learnt: Mapping[str, torch.Tensor],
    ) -> None:
        """Set the step, the losses, the place in the data and the random state, after a check of them.

        `rng` is empty for a rank that the saved run did not have. `learnt` has delayed
        scaling's state, among other things.
        """
        try:
            check_place(step, losses, position, rng, self.device)
            self._set_learnt(learnt)
        except ValueError as error:
            raise as_damaged(path, error) from None
        torch.manual_seed(draw_seed(self.config.train.seed, step, self.world.rank))
        if "cpu" in rng:
            torch.set_rng_state(rng["cpu"])
        if self.device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], self.device)
        self.losses[:step] = losses.to(self.device)
        self.step, self.batches.position = step, position

    def _set_learnt(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the scales and amax histories of delayed scaling from a state dict."""
        for name, value in state.items():
            if name.endswith(DELAYED):
                module: Any = dict(self.model.named_modules()).get(name.removesuffix(f".{DELAYED}"))
                if not hasattr(module, "reset_fp8_meta_tensors"):
                    raise ValueError(f"{name} is of no module of this model")
                module.set_extra_state(value)

    @property
    def _rng_prefix(self) -> str:
        return f"rng.{self.world.rank}."

    def _rng(self) -> dict[str, torch.Tensor]:
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return rng


def _make_whole(config: RunConfig, world: World) -> LanguageModel:
    """Return the whole model, as one rank alone has it."""
    alone = None
    if config.model.experts and world.size > 1:  # without a group experts would be spread over all ranks
        alone = dist.new_group([world.rank], use_local_synchronization=True)
    return LanguageModel(config.model, expert_group=alone)


def _make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices alone; shards are in groups of their own, since no operation
    takes them together with others."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault((parameter.dim() <= 1, isinstance(parameter, DTensor)), []).append(parameter)
    made = [{"params": groups[key], "weight_decay": 0.0 if key[0] else weight_decay} for key in sorted(groups)]
    return torch.optim.AdamW(made, lr=lr, betas=BETAS, fused=True)
