"""Builds torch's optimizers and transformers' schedules from a scenario, for the backends that train with them.

The sums of squares for gradient norms are exact to the last digits on a CPU as well
(docs/findings/torch-norm-on-cpus.md).
"""

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.optim.lr_scheduler import LRScheduler

from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import OptimizerConfig, ScheduleConfig
from impl.models.lora import named_parameters, trained_names

MATRICES = "orthogonalizes"  # key of a group of parameters


def sums_of_squares(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the sum of squares of each tensor, a float64 scalar."""
    if tensors[0].dtype == torch.float64:
        # On a CPU, torch's norm sums sequentially and is 5e-15 off for a million numbers; torch's sum is pairwise.
        return [tensor.square().sum() for tensor in tensors]
    return [norm.square() for norm in torch._foreach_norm(tensors, dtype=torch.float64)]  # without copies in float64


def parameter_groups(
    parameters: Iterable[Parameter],
    config: OptimizerConfig,
    *,
    dims: Callable[[Parameter], int] = Parameter.dim,
    matrices: Collection[Parameter] = (),
) -> list[dict[str, Any]]:
    """Groups parameters for an optimizer: AdamW decays parameters with two or more dimensions, SGD decays none.

    No group is empty.

    ``parameters``: the trained parameters. ``dims``: returns a parameter's number of dimensions; libraries that flatten
        the parameters that they shard need their own function. ``matrices``: those that Muon updates; their group has
        the key MATRICES.
    """
    parameters = list(parameters)
    if config.name == "sgd":
        return [{"params": parameters}]
    muons = {id(parameter) for parameter in matrices}
    others = [p for p in parameters if id(p) not in muons]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) in muons], "weight_decay": config.weight_decay, MATRICES: True},
        {"params": [p for p in others if dims(p) >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if dims(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class MuonWithAdamW(torch.optim.Optimizer):
    """Steps torch's Muon and AdamW as one optimizer, for a schedule, a loss scaler and checkpoints that take one.

    Each of the two has its own groups; the option ``ns_steps`` tells which are Muon's.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._muon, self._adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Lets both optimizers work on the groups and the state of this one."""
        for one, is_muon in ((self._muon, True), (self._adamw, False)):
            one.param_groups = [group for group in self.param_groups if ("ns_steps" in group) == is_muon]
            one.state = self.state

    def keeps(self, parameter: Parameter, kind: str) -> bool:
        """Returns whether the optimizer of a parameter has this kind of state."""
        is_muons = any(parameter is own for group in self._muon.param_groups for own in group["params"])
        return (kind == "momentum_buffer") == is_muons

    def __setstate__(self, state: dict[str, Any]) -> None:  # torch's load_state_dict calls it
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._muon.step()
        self._adamw.step()


def keeps(optimizer: torch.optim.Optimizer, parameter: Parameter, kind: str) -> bool:
    """Returns whether a training state has this kind of a parameter's state."""
    return optimizer.keeps(parameter, kind) if isinstance(optimizer, MuonWithAdamW) else True


def trained_parameters(model: Module, config: OptimizerConfig) -> list[Parameter]:
    """Returns the trained parameters of ``model``, whose parameter names are Hugging Face's or peft's."""
    trained = trained_names(model, config)
    return [parameter for name, parameter in named_parameters(model) if name in trained]


def freeze_others(model: Module, config: OptimizerConfig) -> None:
    """Makes exactly the trained parameters require gradients."""
    trained = trained_names(model, config)
    for name, parameter in named_parameters(model):
        parameter.requires_grad_(name in trained)


def torch_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, *, device: str, precision: PrecisionName
) -> torch.optim.Optimizer:
    """Builds torch's optimizer over the groups of ``parameter_groups``; AdamW is fused on GPUs to save memory."""
    if config.name == "sgd":  # whose fused kernel takes no DTensor
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    fused = updates_in_one_kernel(device=device, precision=precision)
    matrices = [group for group in groups if MATRICES in group]
    others = [group for group in groups if MATRICES not in group]
    adamw = torch.optim.AdamW(others, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    return MuonWithAdamW(muon(matrices, config), adamw) if matrices else adamw


def stored_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, *, stochastic: bool, replicas: "Replicas | None"
) -> torch.optim.Optimizer:
    """Builds AdamW over parameters without masters: it computes in float32 and rounds its results once, with
    ``stochastic`` parameters at random, by torchao. ``replicas``: parameters that all their ranks round to the same
    numbers; None: each rank draws from its own generator, as torchao does."""
    if not stochastic:  # torch's other kernels round every intermediate result
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    from torchao.optim import _AdamW  # only these cells need torchao

    class RoundedAlike(_AdamW):  # type: ignore[misc]
        """Rounds a replica as the others: its random numbers follow from what it holds, not from the rank
        (docs/findings/torchao-rounded-replicas.md)."""

        param_groups: list[dict[str, Any]]

        def step(self, closure: None = None) -> None:
            groups = self.param_groups
            for number, group in enumerate(groups):
                for region, parameters in by_region(group["params"], replicas).items():
                    self.param_groups = [group | {"params": parameters}]
                    count = int(self.state[parameters[0]].get("step", 0))
                    with numbers_of(replicas, region, (number, count)):
                        super().step()
            self.param_groups = groups

    lr = torch.tensor(config.lr, dtype=torch.float64)  # torchao would make a float32 of a number
    optimizer: torch.optim.Optimizer = RoundedAlike(
        groups, lr=lr, betas=config.betas, eps=config.eps, bf16_stochastic_round=True
    )
    return optimizer


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Says which parameters several ranks hold. region: names the part of a parameter that this rank holds. seed: the
    same on all ranks."""

    region: Callable[[Parameter], str]
    seed: int


def by_region(parameters: Iterable[Parameter], replicas: Replicas | None) -> dict[str, list[Parameter]]:
    """Groups parameters by the part that this rank holds."""
    found: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(replicas.region(parameter) if replicas else "", []).append(parameter)
    return found


@contextlib.contextmanager
def numbers_of(replicas: Replicas | None, region: str, place: tuple[int, int]) -> Iterator[None]:
    """Draws numbers that follow from the region and from ``place``, the group of parameters and the number of updates.

    On a CPU torchao's update is not compiled, which would take a minute.
    """
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    eager = contextlib.nullcontext() if gpus else torch.compiler.set_stance("force_eager")
    with eager, torch.random.fork_rng(devices=gpus) if replicas else contextlib.nullcontext():
        if replicas:
            torch.manual_seed(zlib.crc32(repr((replicas.seed, region, place)).encode()))
        yield


def muon(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Muon:
    """Builds torch's Muon over groups of matrices."""
    groups = [{key: value for key, value in group.items() if key != MATRICES} for group in groups]
    return torch.optim.Muon(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=bool(config.nesterov),
        adjust_lr_fn=config.adjust_lr,
        ns_steps=config.ns_steps,
    )


def updates_in_one_kernel(*, device: str, precision: PrecisionName) -> bool:
    """Returns whether torch's AdamW runs as its fused kernel: on GPUs, in fp32 and bf16.

    With loss scaling the fused kernel would skip updates itself, by numbers that a loss scaler passes to it. It also
    reads the number of steps as float32, whatever its dtype, and the exact tier makes that dtype float64.
    """
    tier = PRECISIONS[precision]
    return device != "cpu" and not (tier.is_exact or tier.is_loss_scaled)


def update_count(count: torch.Tensor, optimizer: torch.optim.Optimizer, updated: torch.Tensor) -> torch.Tensor:
    """Returns the update count of the tensor ``updated``, as torch's AdamW holds it in its state: in a new tensor.

    AdamW counts in place, on the CPU; its fused kernel reads the count on the device.
    """
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    device = updated.device if is_fused else torch.device("cpu")
    return count.to(device, torch.get_default_dtype(), copy=True)


def learning_rates(optimizer: torch.optim.Optimizer, config: ScheduleConfig) -> LRScheduler:
    """Builds transformers' learning-rate schedule for ``optimizer``."""
    import transformers  # here, because the import takes seconds

    # transformers' "constant" ignores its warm-up.
    name = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr"}.get(config.name, config.name)
    scheduler: LRScheduler = transformers.get_scheduler(
        name,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.total_steps,
        scheduler_specific_kwargs={"min_lr_rate": config.min_factor} if config.name == "cosine" else None,
    )
    return scheduler


def read_progress(scheduler: LRScheduler, scaler: GradScaler) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the progress of schedule and loss scale as ``Trainable.named_tensors("progress")`` does."""
    found = {"schedule": float(scheduler.last_epoch)}
    if scaler.is_enabled():
        found |= {"loss_scale": scaler.get_scale(), "good_steps": float(scaler._get_growth_tracker())}
    yield from ((name, torch.tensor(value, dtype=torch.float64)) for name, value in found.items())


def set_schedule(scheduler: LRScheduler, updates: int) -> None:
    """Sets the number of updates that a schedule has counted, and the learning rates for the next update."""
    if updates:
        scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": updates - 1, "_step_count": updates + 1})
        scheduler.step()


def set_loss_scale(scaler: GradScaler, progress: Mapping[str, float]) -> None:
    """Sets the loss scale and the good steps of ``scaler``, if it is enabled and ``progress`` has a loss scale."""
    if scaler.is_enabled() and "loss_scale" in progress:
        found = {"scale": progress["loss_scale"], "_growth_tracker": int(progress.get("good_steps", 0))}
        scaler.load_state_dict(scaler.state_dict() | found)
