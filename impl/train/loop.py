"""Runs the training loop of ``parity train``, the same for all objectives and all backends.

A unit of work is an optimizer step, or a rollout with all its updates. After it the ranks agree whether to stop,
to evaluate held-out data and to write a checkpoint (docs/explanations/checkpoints.md). Ctrl-C and SIGTERM stop a
training where it can be resumed. impl/engine/trainer.py computes a step; the suite's cells judge it.
"""

import contextlib
import gc
import re
import resource
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from conformance.core.errors import UsageError
from conformance.core.process import not_ignored
from conformance.models.folders import EMBEDDING, HEAD
from conformance.numerics.float64_tier import exact_tier
from conformance.spec.batch import Batch
from conformance.spec.observables import POLICY, Head
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.worker.rank_state import seed_generators
from impl.checkpoints.folder import LATEST, TrainingFolder, checkpoint_name, read_native, write_native
from impl.checkpoints.manifest import read_manifest
from impl.checkpoints.training_state import DataPosition
from impl.engine.adapter import ReferenceBackend
from impl.engine.memory_estimate import elements
from impl.interface.distributed import on_first
from impl.interface.trainable import Adaptable
from impl.train.config import OutputConfig, TrainConfig
from impl.train.experience import check_resumes, logprob_gap
from impl.train.logging import Reporter, open_reporter
from impl.train.plan import parameter_shapes, read_sizes
from impl.train.setup import (
    Evaluate,
    adapter_folder,
    check,
    check_same_settings,
    evaluation_of,
    model_folders,
    read_inputs,
    result_of,
    set_up,
    settings_of,
    source_of,
)
from impl.train.text_pipeline import Source

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Sets ``requested`` at the first of SIGNALS inside the ``with`` statement; a second signal has its usual effect.

    A signal that was ignored before stays ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        self._before = {number: signal.signal(number, self._note) for number in not_ignored(*SIGNALS)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def __exit__(self, *_: object) -> None:
        self._restore()


# Floating-point operations per second of dense products in half precision, by a word of the device's name: NVIDIA's
# data sheets, without sparsity. PCIe cards of the same name are slower, except the A100.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12}
_SLOTS, _AS_FAST = {"PCIE", "NVL"}, {"A100"}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Holds the sizes that decide the floating-point operations of a model.

    parameters: of matrix products, so without an input embedding.
    attention: layers x heads x head size.
    frozen: those of ``parameters`` that get no gradient.
    """

    parameters: int
    attention: int
    frozen: int = 0

    def flops(self, lengths: Iterable[int]) -> float:
        """Counts the operations of forward and backward passes over documents of these lengths.

        They are 6 N T + 12 L H Q T^2 for a document of T tokens, and 2 T less for each frozen parameter (Chowdhery et
        al., arXiv 2204.02311, appendix B). Recomputation is not counted.
        """
        products = 6 * self.parameters - 2 * self.frozen
        return float(sum(products * t + 12 * self.attention * t * t for t in lengths))


def model_size(folder: Path, head: Head) -> ModelSize:
    """Returns the size of the model that a Hugging Face folder makes with a head.

    An input embedding is a look-up and computes nothing; a tied head counts as a product.
    """
    shapes, sizes = parameter_shapes(folder, head), read_sizes(folder)
    tied = head == "causal" and not any(name.endswith(HEAD) for name in shapes)
    looked_up = {name: shape for name, shape in shapes.items() if name.endswith(EMBEDDING) and not tied}
    return ModelSize(parameters=elements(shapes) - elements(looked_up), attention=sizes.layers * sizes.queries)


def peak_flops(device: str, precision: PrecisionName) -> float | None:
    """Returns the operations per second of one device, for precisions as fast as bfloat16; None if unknown."""
    if not device.startswith("cuda") or not PRECISIONS[precision].is_half:
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Returns the operations per second of the device of this name; None if unknown."""
    words = set(re.split("[ -]", name.upper()))
    known = next(iter(words & PEAKS.keys()), None)
    return None if known is None or (words & _SLOTS and known not in _AS_FAST) else PEAKS[known]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measures speed. ``models``: sizes of the trained models. ``peak``: of all devices together; None if unknown."""

    models: Mapping[str, ModelSize]
    peak: float | None

    def of(self, batch: Batch, seconds: float) -> dict[str, float | None]:
        """Returns tokens and samples of a step, and tokens per second. MFU is for the step's updates."""
        lengths = [len(document.tokens) for document in batch.documents]
        flops = sum(size.flops(lengths) for size in self.models.values())
        return {
            "training/tokens": sum(lengths),
            "training/samples": len(lengths),
            "timing_s/update": seconds,
            "perf/tokens_per_second": sum(lengths) / seconds,
            "perf/mfu": None if self.peak is None else flops / seconds / self.peak,
        }


def peak_memory(device: str) -> int:
    """Returns the peak bytes of tensors on a GPU so far, or of the process in the machine's memory."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def found_checkpoint(config: TrainConfig) -> tuple[Path, int] | None:
    """Returns the checkpoint that a training resumes from, and its updates; None to begin with the first update.

    Collective. Raises UsageError if a training that begins finds checkpoints of another, and if a training cannot
    resume with its own rollouts.
    """
    output = config.output
    root = output.ckpt_path
    if root is None:
        if output.load_checkpoint:
            raise UsageError("load_checkpoint resumes from a checkpoint in ckpt_path; give ckpt_path, too")
        return None

    def first() -> tuple[Path, int] | None:
        if not (root / LATEST).exists():
            return None
        if not output.load_checkpoint:
            raise UsageError(
                f"{root} holds checkpoints of another training; resume with load_checkpoint, or give a new ckpt_path"
            )
        folder = TrainingFolder(root=root).latest()
        about = read_manifest(folder).about
        if about.settings is not None:
            check_same_settings(config, about.settings, step=about.step, source=folder)
        if config.rollout is not None and about.data is not None:
            check_resumes(config.scenario, config.rollout, step=about.step, position=about.data)
        return folder, about.step

    return on_first(f"looking for checkpoints in {root}", first)


def training_folder(output: OutputConfig) -> TrainingFolder | None:
    if output.ckpt_path is None:
        return None
    return TrainingFolder(root=output.ckpt_path, keep=output.keep, asynchronous=output.async_save)


@dataclass(frozen=True)
class Checkpoints:
    """Writes and loads the checkpoints of one training in ``folder``, if any. All methods are collective.

    settings: those of ``settings_of`` when the training began, because folders of models may change or go meanwhile.
    """

    backend: ReferenceBackend
    folder: TrainingFolder | None
    settings: dict[str, dict[str, Any]]

    def save(self, position: DataPosition) -> None:
        """Writes a checkpoint of the current state; the data before ``position`` has been trained on."""
        assert self.folder
        about = replace(self.backend.about("native"), data=position, settings=self.settings)
        with self.folder.writing(about) as draft:
            write_native(draft, self.backend.context, self.backend.trained)

    def finish(self) -> None:
        """Returns when the last checkpoint is complete; raises the error of a failed write."""
        if self.folder:
            self.folder.finish()

    def load(self, folder: Path, start: DataPosition) -> DataPosition:
        """Loads a checkpoint and returns its position in the data. ``start``: the first position of this training.

        Raises UsageError if this training cannot resume from it; nothing has changed then.
        """
        before = on_first(f"reading {folder}", lambda: read_manifest(folder).about.data)
        if before is None:
            raise UsageError(f"{folder} has no position in the data; give a checkpoint of a training")
        start.check_same_data(before)
        found = read_native(folder, self.backend.about("native"), self.backend.context, self.backend.trained)
        self.backend.step = found.step
        return before


RENAMED = {  # keys of observables -> names in verl's logs
    "entropy_loss": "entropy",
    "token_count": "target_tokens",
    "sequence_count": "responses",
    "critic.loss": "critic/vf_loss",
    "critic.clipfrac": "critic/vf_clipfrac",
    "critic.explained_var": "critic/vf_explained_var",
}


def log_name(key: str, *, group: str) -> str:
    """Returns the name of an observable in the log: of the critic, else of ``group``."""
    name = RENAMED.get(key, key).replace("critic.", "critic/")
    return name if "/" in name else f"{group}/{name}"


def train(config: TrainConfig) -> None:
    """Trains as configured; called in every rank.

    The default process group is initialised and, on GPUs, the rank's own GPU is the current device. Raises UsageError
    for a configuration that cannot be trained, before any update.
    """
    check(config)
    device = "cpu" if config.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    scenario, output = config.scenario, config.output
    checkpoint = found_checkpoint(config)
    inputs = read_inputs(config)
    done = checkpoint[1] if checkpoint else 0
    folders = model_folders(config)
    kept = config.models if output.ckpt_path else {}
    settings = on_first("reading frozen models", lambda: settings_of(scenario, kept))
    with contextlib.ExitStack() as stack:
        if scenario.tier.is_exact:
            stack.enter_context(exact_tier())
        stop = stack.enter_context(Stop())
        seed_generators(scenario.seed, dist.get_rank(), done)
        adapter = adapter_folder(config, resumes=checkpoint is not None)
        backend = set_up(config, folders, device, adapter)
        source = source_of(config, backend, inputs, device)
        checkpoints = Checkpoints(backend, training_folder(output), settings)
        if checkpoint:
            source.position = checkpoints.load(checkpoint[0], source.position)
        training = Training(
            config=config,
            backend=backend,
            source=source,
            checkpoints=checkpoints,
            evaluate=evaluation_of(config, backend, source, inputs),
            reporter=stack.enter_context(open_reporter(config, done=done)),
            speed=speed_of(config, folders, device),
            stop=stop,
            device=device,
        )
        gc.collect()
        gc.freeze()  # else each full collection would traverse all objects of imports and set-up, for 0.2 s
        training.run()
        if backend.step >= scenario.steps and output.save_path:
            model = backend.models[result_of(scenario.objective).name]
            if output.merged:
                assert isinstance(model, Adaptable)
                model.save_merged(output.save_path)
            else:
                model.save_model(output.save_path)
            training.reporter.say(f"wrote the model {output.save_path}")
        backend.teardown()  # collective, so it is skipped if a rank has failed


@dataclass(frozen=True, kw_only=True)
class Training:
    """Runs a training that has been set up. ``run`` is collective."""

    config: TrainConfig
    backend: ReferenceBackend
    source: Source
    checkpoints: Checkpoints
    evaluate: Evaluate | None
    reporter: Reporter
    speed: Speed
    stop: Stop
    device: str

    def run(self) -> None:
        """Trains to the last update, or until a rank receives a signal to stop."""
        steps, output = self.config.scenario.steps, self.config.output
        if self.evaluate and not self.backend.step:
            self.reporter.step(0, self.evaluate())
        stopped = False
        while self.backend.step < steps and not stopped:
            before = self.backend.step
            stopped = self._work()
            after = self.backend.step
            last = stopped or after >= steps
            if output.ckpt_path and (last or crosses(before, after, output.save_steps)):
                self.checkpoints.save(self.source.position)
        self.checkpoints.finish()
        self._report_result()

    def _report_result(self) -> None:
        step, steps, output = self.backend.step, self.config.scenario.steps, self.config.output
        parts = [f"{'finished' if step >= steps else 'stopped'} after update {step} of {steps}"]
        parts += [self.reporter.result(), f"log: {output.log}"]
        if output.ckpt_path:
            advice = "" if step >= steps else " (resume with --load-checkpoint)"
            parts.append(f"checkpoint: {output.ckpt_path / checkpoint_name(step)}{advice}")
        elif step < steps:
            parts.append("no checkpoint, because --ckpt-path was not given")
        self.reporter.say("; ".join(parts))

    def _work(self) -> bool:
        """Does one unit of work; returns whether a rank has received a signal to stop."""
        first, began = self.backend.step, time.perf_counter()
        work = self.source.next(first)
        known = {**work.numbers, "timing_s/rollout": time.perf_counter() - began} if work.numbers else {}
        stopped = False
        for batch in work.batches:
            numbers = self._update(batch) | (known if batch is work.batches[0] else {})
            all_ranks = self.backend.context.all_gather((self.stop.requested, peak_memory(self.device)))
            stopped = any(requested for requested, _ in all_ranks)
            numbers["training/epoch"] = self.source.position.consumed / self.source.position.documents
            numbers["perf/peak_memory_bytes"] = max(memory for _, memory in all_ranks)
            if batch is work.batches[-1] and self.evaluate and self._is_evaluated(first):
                numbers |= self.evaluate()
            self.reporter.step(self.backend.step, numbers)
        return stopped

    def _is_evaluated(self, before: int) -> bool:
        step = self.backend.step
        return step >= self.config.scenario.steps or crosses(before, step, self.config.eval_steps)

    def _update(self, batch: Batch) -> dict[str, float | None]:
        """Makes one optimizer step, and returns its numbers."""
        began = time.perf_counter()
        self.backend.with_rows = bool(batch.rollout)  # for the gap between sampler and training
        metrics = self.backend.train_step(batch, lambda model: None)
        group = "train" if self.config.rollout is None else "actor"
        numbers: dict[str, float | None] = {log_name(key, group=group): n for key, n in metrics.values.items()}
        numbers |= self.speed.of(batch, time.perf_counter() - began)
        if batch.rollout:
            numbers |= logprob_gap(self.backend.context, batch, metrics.rows["logprob"])
        return numbers


def crosses(before: int, after: int, every: int) -> bool:
    """Returns whether a multiple of ``every`` lies after ``before`` updates, up to and including ``after``."""
    return before // every < after // every


def speed_of(config: TrainConfig, folders: Mapping[str, Path], device: str) -> Speed:
    """Returns the sizes and the peak by which a step's speed is measured."""
    peak = peak_flops(device, config.scenario.precision)
    roles = [role for role in config.scenario.objective.roles if role.trained]
    models = {role.name: model_size(folders[role.name], role.head) for role in roles}
    if config.scenario.lora:  # the adapters' own operations are not counted
        models[POLICY.name] = replace(models[POLICY.name], frozen=models[POLICY.name].parameters)
    return Speed(
        models=models,
        peak=peak and peak * dist.get_world_size(),
    )
