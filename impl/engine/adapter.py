"""Implements what all built-in backends share: the protocol, on impl.interface.trainable, and a part of contexts."""

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.backends.protocol import BackendInfo, NamedTensors, Shard, StepMetrics, Support, TensorKind, Traced
from conformance.models.folders import weight_shapes
from conformance.spec.batch import Batch, Row
from conformance.spec.known_defects import ExpectedDifference
from conformance.spec.layout import Layout
from conformance.spec.observables import POLICY, PROGRESS_OF_SCALE, SKIPPED, model_key
from conformance.spec.scenario import ADAPTER, LossScaleConfig, Scenario
from impl.checkpoints import training_state
from impl.checkpoints.folder import read_native, verified, write_native, writing
from impl.checkpoints.manifest import About, Form
from impl.engine.trainer import Rollouts, step_inputs, train_step
from impl.interface.distributed import all_gather_value, all_reduce_number, all_reduce_over
from impl.interface.micro_batches import numbered
from impl.interface.trainable import Adaptable, Context, ContextConfig, Trainable, get_context
from impl.models.family_quirks import quirks_in
from impl.models.lora import adapter_shapes
from impl.objectives.policy_gradient import FUNCTIONS


def switch_off_dropout(model: torch.nn.Module) -> None:
    """Sets all dropout probabilities in ``model`` to 0.

    Objectives that compare log-probs of two forward passes need this: with dropout, the ratio would not be 1 at the
    first update of a rollout. Evaluation mode is no substitute, because transformers recomputes layers (gradient
    checkpointing) only in training mode.
    """
    set_dropout(model, 0.0)


def set_dropout(model: torch.nn.Module, rate: float) -> None:
    """Sets all dropout probabilities in ``model``: those of Dropout modules, attention, residuals and adapters."""
    for module in [*model.modules()]:
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
        elif rate and isinstance(of_adapters := getattr(module, "lora_dropout", None), torch.nn.ModuleDict):
            of_adapters.update({name: torch.nn.Dropout(rate) for name in of_adapters})  # peft has none at a rate of 0
        for name in ("attention_dropout", "residual_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)


# Patch points (functions that a fault can replace) that all backends share; impl/faults/catalogue.py describes them.
RL_SEAMS = {
    "rollout_columns": "impl.engine.trainer:rollout_columns",
    "output_rows": "impl.engine.trainer:output_rows",
    "annotated": "impl.engine.trainer:Rollouts.annotated",
    "token_rewards": "impl.objectives.advantages:token_rewards",
    "kl_in_reward": "impl.objectives.advantages:kl_estimate",
    "estimate": "impl.objectives.policy_gradient:estimate",
    "of_groups": "impl.objectives.advantages:of_groups",
    "group_advantages": "impl.objectives.advantages:group_advantages",
    "group_deviation": "impl.objectives.advantages:group_deviation",
    "rloo": "impl.objectives.advantages:rloo",
    "of_responses": "impl.objectives.advantages:of_responses",
    "next_values": "impl.objectives.advantages:next_values",
    "whiten": "impl.objectives.advantages:whiten",
    "importance_weights": "impl.objectives.policy_gradient:importance_weights",
    "kept_groups": "impl.objectives.policy_gradient:kept_groups",
    "overlong_penalty": "impl.objectives.policy_gradient:overlong_penalty",
    "gate": "impl.objectives.losses:gate",
    "evaluate": "impl.objectives.policy_gradient:PolicyGradientFunctions.evaluate",
    "loss_weights": "impl.objectives.policy_gradient:loss_weights",
    "token_weights": "impl.objectives.policy_gradient:token_weights",
    "policy_losses": "impl.objectives.policy_gradient:policy_losses",
    "dual_clipped": "impl.objectives.losses:dual_clipped",
    "sequence_mean": "impl.objectives.losses:sequence_mean",
    "kl_in_loss": "impl.objectives.policy_gradient:kl_estimate",
    "actor_loss": "impl.objectives.policy_gradient:actor_loss",
    "value_losses": "impl.objectives.policy_gradient:value_losses",
    "of_all_ranks": "impl.engine.trainer:of_all_ranks",
    "kept_logits": "impl.models.outputs:kept_logits",
    "pair_margins": "impl.objectives.preferences:pair_margins",
    "pair_losses": "impl.objectives.preferences:pair_losses",
    "evaluate_pairs": "impl.objectives.preferences:PreferenceFunctions.evaluate",
    "answer_scores": "impl.objectives.preferences:answer_scores",
    "reward_losses": "impl.objectives.preferences:reward_losses",
    "mismatched_ratios": "impl.objectives.preferences:mismatched_ratios",
    "step_scores": "impl.objectives.preferences:step_scores",
    "step_losses": "impl.objectives.preferences:step_losses",
    "answer_losses": "impl.objectives.preferences:answer_losses",
    "evaluate_answers": "impl.objectives.preferences:KtoFunctions.evaluate",
    "weighted_losses": "impl.objectives.policy_gradient:weighted_losses",
    "divergences": "impl.models.outputs:divergences",
    "divergence_terms": "impl.models.outputs:divergence_terms",
    "scaled_logits": "impl.models.outputs:scaled",
}
# For preload: it imports peft, for which each fresh rank needs 0.3 s. Peft imports TransformerEngine, which may
# initialise CUDA; a process that forks must not.
SCHEDULES = () if find_spec("transformer_engine") else ("transformers.optimization",)
SHARED_SEAMS = {
    **RL_SEAMS,
    "read_slice": "impl.interface.sharded_safetensors:SliceReader.slice",
    "collate": "impl.engine.trainer:collate",
    "step_totals": "impl.engine.trainer:step_totals",
    "shard_inputs": "impl.context_parallel.sequence_sharding:shard_inputs",
    "merge_blocks": "impl.context_parallel.ring_functions:ring_varlen.update_out_and_lse",
    "load_kind": "impl.checkpoints.training_state:load_kind",
    "load_progress": "impl.checkpoints.training_state:load_progress",
    "read_generators": "impl.checkpoints.training_state:load_generators",
    "router_loss": "impl.models.router:router_loss",
    "z_loss": "impl.models.router:z_loss",
    "choices_for": "impl.engine.trainer:choices_for",
}
# Patch points of the backends that run a Hugging Face model.
HUGGING_FACE_SEAMS = {
    "write_model": "impl.engine.hugging_face:write_model",
    "hugging_face_model": "impl.engine.hugging_face:empty_model",
    "load_adapter": "impl.engine.hugging_face:load_adapter",
    "separate_states": "impl.models.loading:separate_states",
    "trained_names": "impl.engine.optimizers:trained_names",
    "merge_adapter": "impl.models.export:merge_adapter",
    "switch_off_dropout": "impl.engine.adapter:switch_off_dropout",
    "updated_bias": "impl.models.router:updated_bias",
}
# Patch points of the backends that can leave logits sharded along the vocabulary.
VOCABULARY_SEAMS = {
    "kept_logits_of_shard": "impl.models.outputs:kept_logits",
    "through_softmax": "impl.models.outputs:through_softmax_",
    "through_label": "impl.models.outputs:through_label_",
    "sum_over_shards": "impl.models.outputs:sum_over_shards",
    "least_of_top_k": "impl.models.outputs:least_of_top_k",
}


def seams_of_model(model: str, *others: str) -> dict[str, str]:
    """Returns the methods of a trainable that are patch points: those of every backend, and ``others``."""
    shared = ("load_model", "create_optimizer", "forward_backward", "backward", "gradient_scale", "finish_gradients")
    return {name: f"{model}.{name}" for name in (*shared, "optimizer_step", *others)}


CHECKPOINT = "checkpoint"  # the checkpoint's folder inside the folder that the suite passes to save and load


class ReferenceBackend:
    """Adapts ``get_context(name)`` to the suite; subclasses define ``info``, ``supports``, ``preload``, ``seams``."""

    info: ClassVar[BackendInfo]
    objectives = FUNCTIONS
    expected: ClassVar[tuple[ExpectedDifference, ...]] = ()
    shows_training_state = True
    preload: ClassVar[tuple[str, ...]]
    seams: ClassVar[dict[str, str]]
    context: Context
    models: dict[str, Trainable]
    adapter: Path | None = None  # the folder of the policy's adapter, if it is not in the policy's weights folder
    step: int  # optimizer steps done so far, including those before a loaded checkpoint
    with_rows = True  # whether metrics have rows; rows cost a copy of a number per token to the host

    @classmethod
    def describe(cls) -> BackendInfo:
        return cls.info

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        raise NotImplementedError

    def setup(self, scenario: Scenario, layout: Layout, weights: Mapping[str, Path], device: str) -> dict[str, Any]:
        adapter = self.adapter or weights.get(POLICY.name, Path()) / ADAPTER
        config = ContextConfig(
            layout=layout,
            precision=scenario.precision,
            device=device,
            accumulation=scenario.accumulation,
            packed=scenario.data.packed,
            loss_scale=scenario.loss_scale or LossScaleConfig(),
            trust_remote_code=scenario.trust_remote_code,
            router_z_loss=scenario.router_z_loss,
            router_bias_rate=scenario.router_bias_rate,
            whole_experts=any(quirks_in(folder).biased_experts for folder in weights.values()),
        )
        self.objective, self.optimizer_kind, self.step = scenario.objective, scenario.optimizer.name, 0
        self.judges_loss_scale = scenario.judged_loss_scale is not None
        self.shapes = {role.name: weight_shapes(weights[role.name]) for role in self.objective.roles if role.trained}
        if scenario.lora:
            self.shapes[POLICY.name] |= adapter_shapes(adapter)
        self.context = get_context(self.info.name, config)
        self.context.setup_distributed()
        self.models = {}
        for role in self.objective.roles:
            trainable = self.context.new_trainable(role.head)
            optimizer = scenario.optimizer if role.trained else None
            model = trainable.load_model(weights[role.name])
            if scenario.lora and role == POLICY:
                assert isinstance(trainable, Adaptable)
                trainable.add_adapter(model, adapter)
            if self.objective.disable_dropout:
                switch_off_dropout(model)
            trainable.prepare(model, optimizer, scenario.schedule)
            self.models[role.name] = trainable
        self.rollouts = Rollouts(self.context, self.models, self.objective)
        resolved = {name: trainable.resolved() for name, trainable in self.models.items()}
        return next(iter(resolved.values())) if len(resolved) == 1 else resolved

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        if self.objective.reads == "rollouts":
            batch = self.rollouts.annotated(batch)
        metrics = train_step(
            self.context, self.models, self.objective, batch, on_gradients=on_gradients, with_rows=self.with_rows
        )
        if self.objective.reads == "rollouts" and self.with_rows:
            metrics.rows.update(self.rollouts.routing(batch))
        self.step = batch.step + 1
        if self.judges_loss_scale:
            for role in (role for role in self.objective.roles if role.trained):
                settings = loss_scale_settings(self.models[role.name])
                metrics.values.update({model_key(role.prefix, key): number for key, number in settings.items()})
        return metrics

    def traced(self, model: str, batch: Batch) -> Traced:
        rows, inputs = step_inputs(self.context, batch)
        return self.models[model].traced([numbered(batch, *one) for one in zip(rows, inputs, strict=True)])

    def named_tensors(self, kind: TensorKind, model: str) -> NamedTensors:
        return self.models[model].named_tensors(kind)

    def local_shards(self, kind: TensorKind, model: str) -> Iterator[Shard]:
        return self.models[model].local_shards(kind)

    def library_generators(self) -> Mapping[str, Tensor]:
        return self.context.library_generators()

    def save(self, path: Path) -> None:
        with writing(path / CHECKPOINT, self.about("native")) as draft:
            write_native(draft, self.context, self.trained)

    def load(self, path: Path) -> None:
        found = read_native(path / CHECKPOINT, self.about("native"), self.context, self.trained)
        self.step = found.step

    def export_state(self, path: Path) -> None:
        with writing(path / CHECKPOINT, self.about("state")) as draft:
            for name, trainable in self.trained.items():
                training_state.export_state(draft.path / name, trainable)

    def import_state(self, path: Path) -> None:
        found = verified(path / CHECKPOINT, self.about("state")).about
        for name, trainable in self.trained.items():
            training_state.import_state(path / CHECKPOINT / name, trainable)
        self.step = found.step

    def about(self, form: Form) -> About:
        """Describes this training at its current step, for the manifest of a checkpoint."""
        return About(
            form=form,
            backend=self.info.name,
            layout=str(self.context.config.layout),
            precision=self.context.config.precision,
            objective=self.objective.kind,
            optimizer=self.optimizer_kind,
            step=self.step,
            world_size=dist.get_world_size(),
            models=self.shapes,
        )

    @property
    def trained(self) -> dict[str, Trainable]:
        """Returns the trained models, by role."""
        return {role.name: self.models[role.name] for role in self.objective.roles if role.trained}

    def export(self, path: Path, model: str) -> None:
        # In the dtype of the masters, because the weights that the next phase loads are compared bit by bit.
        self.models[model].save_model(path, dtype="masters")

    def export_merged(self, path: Path, model: str) -> None:
        trainable = self.models[model]
        assert isinstance(trainable, Adaptable)
        trainable.save_merged(path, dtype="masters")

    def teardown(self) -> None:
        for trainable in self.models.values():
            trainable.teardown()
        self.models = {}
        self.context.teardown()


def loss_scale_settings(trainable: Trainable) -> dict[str, float]:
    """Returns the settings of the loss scale after a step of a model in fp16 (conformance.spec.observables)."""
    progress = {name: float(number) for name, number in trainable.named_tensors("progress")}
    return {SKIPPED: float(trainable.skipped), **{key: progress[key] for key in PROGRESS_OF_SCALE}}


class ReferenceContext:
    """Implements a part of impl.interface.trainable.Context, which has the contract of each method."""

    data_rank: int
    data_size: int

    def __init__(self, config: ContextConfig) -> None:
        self.config = config

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        """Returns the groups of ranks with different rows; ranks on other axes hold the same numbers."""
        raise NotImplementedError

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        return batch.micro_batches(
            dp_rank=self.data_rank, dp_size=self.data_size, accumulation=self.config.accumulation
        )

    def all_reduce(self, value: float) -> float:
        return all_reduce_number(value, groups=self.data_groups, device=self.config.device)

    def all_reduce_tensor(self, tensor: Tensor) -> Tensor:
        return all_reduce_over(tensor, groups=self.data_groups)

    def all_gather(self, value: Any) -> list[Any]:
        return all_gather_value(value)

    def library_generators(self) -> dict[str, Tensor]:
        return {}

    def set_library_generators(self, states: Mapping[str, Tensor]) -> None:
        assert not states, f"{type(self).__name__} has no generators {', '.join(states)}"
