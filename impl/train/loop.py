"""The training loop of ``parity train``, the same for SFT, GRPO and PPO and for all backends.

Work is an optimizer step of SFT, or a roll-out with all its updates; after it the ranks agree whether to stop, look at
held-out data and write a checkpoint. What a step computes is impl/trainer.py, which the suite's cells judge.
"""

import contextlib
import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from conformance.batch import Batch
from conformance.role import POLICY
from conformance.run.exact import exact_tier
from conformance.run.generators import seed_generators
from impl.adapter import StrategyBackend
from impl.strategy import Adaptable
from impl.train.checkpoints import Checkpoints, found_checkpoint, training_folder
from impl.train.config import TrainConfig
from impl.train.experience import logprob_gap
from impl.train.inputs import read_inputs
from impl.train.setup import Evaluate, adapter_folder, check, evaluation_of, model_folders, set_up, source_of
from impl.train.source import Source
from impl.train.speed import Speed, model_size, peak_flops, peak_memory
from impl.train.stop import Stop
from impl.train.telling import Telling, telling

RENAMED = {  # keys of observables -> names in the log
    "ppo_kl": "kl",
    "pg_clipfrac": "clip_fraction",
    "pg_clipfrac_lower": "dual_clip_fraction",
    "entropy_loss": "entropy",
    "token_count": "target_tokens",
    "sequence_count": "responses",
    "critic.loss": "critic_loss",
    "critic.lr": "critic_lr",
    "critic.grad_norm": "critic_grad_norm",
    "critic.clipfrac": "critic_clip_fraction",
    "critic.explained_var": "explained_variance",
}


def train(config: TrainConfig) -> None:
    """Train as configured; called in every rank, with the default process group initialised and, on GPUs, the rank's
    own as the current device.

    Raises UsageError for what cannot be trained, before any update.
    """
    check(config)
    device = "cpu" if config.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    scenario, output = config.scenario, config.output
    checkpoint = found_checkpoint(config)
    inputs = read_inputs(config)
    done = checkpoint[1] if checkpoint else 0
    folders = model_folders(config)
    with contextlib.ExitStack() as stack:
        if scenario.precision == "exact":
            stack.enter_context(exact_tier())
        stop = stack.enter_context(Stop())
        seed_generators(scenario.seed, dist.get_rank(), done)
        adapter = adapter_folder(config, goes_on=checkpoint is not None)
        backend = set_up(config, folders, device, adapter)
        source = source_of(config, backend, inputs, device)
        checkpoints = Checkpoints(backend, training_folder(output))
        if checkpoint:
            source.position = checkpoints.load(checkpoint[0], source.position)
        training = Training(
            config=config,
            backend=backend,
            source=source,
            checkpoints=checkpoints,
            evaluate=evaluation_of(config, backend, source, inputs),
            told=stack.enter_context(telling(config, done=done)),
            speed=speed_of(config, folders, device),
            stop=stop,
            device=device,
        )
        gc.collect()
        gc.freeze()  # or each full collection would look at all that imports and set-up have made, for 0.2 s
        training.run()
        if backend.step >= scenario.steps and output.save_path:
            policy = backend.models[POLICY.name]
            if output.merged:
                assert isinstance(policy, Adaptable)
                policy.save_merged(output.save_path)
            else:
                policy.save_model(output.save_path)
            training.told.say(f"wrote the model {output.save_path}")
        backend.teardown()  # collective, and so not where a rank has failed


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training that has been set up. ``run`` is collective."""

    config: TrainConfig
    backend: StrategyBackend
    source: Source
    checkpoints: Checkpoints
    evaluate: Evaluate | None
    told: Telling
    speed: Speed
    stop: Stop
    device: str

    def run(self) -> None:
        """Train to the last update, or until a rank is asked to stop."""
        steps, output = self.config.scenario.steps, self.config.output
        if self.evaluate and not self.backend.step:
            self.told.step(0, self.evaluate())
        stopped = False
        while self.backend.step < steps and not stopped:
            before = self.backend.step
            stopped = self._work()
            after = self.backend.step
            last = stopped or after >= steps
            if output.ckpt_path and (last or crosses(before, after, output.save_steps)):
                self.checkpoints.save(self.source.position)
        self.checkpoints.finish()
        if stopped and self.backend.step < steps:
            rest = "go on with load_checkpoint" if output.ckpt_path else "without ckpt_path there is no checkpoint"
            self.told.say(f"stopped after update {self.backend.step} of {steps}; {rest}")

    def _work(self) -> bool:
        """Work from one place where a training can be interrupted to the next; whether a rank was asked to stop."""
        first, began = self.backend.step, time.perf_counter()
        work = self.source.next(first)
        known = {**work.numbers, "rollout_seconds": time.perf_counter() - began} if work.numbers else {}
        stopped = False
        for batch in work.batches:
            numbers = self._update(batch) | (known if batch is work.batches[0] else {})
            of_ranks = self.backend.context.all_gather((self.stop.asked, peak_memory(self.device)))
            stopped = any(asked for asked, _ in of_ranks)
            numbers["epoch"] = self.source.position.consumed / self.source.position.documents
            numbers["peak_memory_bytes"] = max(memory for _, memory in of_ranks)
            if batch is work.batches[-1] and self.evaluate and self._is_evaluated(first):
                numbers |= self.evaluate()
            self.told.step(self.backend.step, numbers)
        return stopped

    def _is_evaluated(self, before: int) -> bool:
        step = self.backend.step
        return step >= self.config.scenario.steps or crosses(before, step, self.config.eval_steps)

    def _update(self, batch: Batch) -> dict[str, float | None]:
        """One optimizer step, and its numbers."""
        began = time.perf_counter()
        self.backend.with_rows = bool(batch.rollout)  # for the gap between sampler and training
        metrics = self.backend.train_step(batch, lambda model: None)
        numbers: dict[str, float | None] = {RENAMED.get(key, key): n for key, n in metrics.values.items()}
        numbers |= self.speed.of(batch, time.perf_counter() - began)
        if batch.rollout:
            numbers |= logprob_gap(self.backend.context, batch, metrics.rows["logprob"])
        return numbers


def crosses(before: int, after: int, every: int) -> bool:
    """Whether a multiple of ``every`` lies behind ``before`` updates, and up to ``after``."""
    return before // every < after // every


def speed_of(config: TrainConfig, folders: Mapping[str, Path], device: str) -> Speed:
    """What a step's speed is measured by."""
    peak = peak_flops(device, config.scenario.precision)
    roles = [role for role in config.scenario.objective.roles if role.trained]
    models = {role.name: model_size(folders[role.name], role.head) for role in roles}
    if config.scenario.lora:  # what adapters compute themselves is left out
        models[POLICY.name] = replace(models[POLICY.name], frozen=models[POLICY.name].parameters)
    return Speed(
        models=models,
        peak=peak and peak * dist.get_world_size(),
    )
