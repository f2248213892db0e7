"""Runs verl on its FSDP2 engine as a backend: SFT, GRPO, and PPO with a critic.

The adapter is verl's controller for one rollout: old log-probs, reference log-probs and values by ``infer_batch``,
then ``apply_kl_penalty`` and ``compute_advantage`` of its trainer, then ``train_mini_batch`` of critic and actor,
whole, with all mini-batches and epochs. Each ``train_mini_batch`` is paused at every optimizer step.

verl's Megatron engine has no class here. With ``vanilla_mbridge`` its layers are mbridge's, which asks for
TransformerEngine ("name 'TENorm' is not defined" without it). Without, they are Megatron-Bridge's, whose local layers
need ``use_remove_padding=False``; this way is not tried.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sft import VerlSft

import parity

with parity.on_cpu(stand_ins=("vllm",)):
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric
    from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss, value_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

BACKENDS = ("Verl",)
# verl's names, by the keys of the suite: outputs of a model, and columns of the batch of an update.
OUTPUTS = {"policy": {"logprob": "log_probs", "entropy": "entropy"}, "critic": {"critic.value": "values"}}
COLUMNS = {
    "policy": {"old_logprob": "old_log_probs", "advantage": "advantages", "reference.logprob": "ref_log_prob"},
    "critic": {"critic.old_value": "values", "return": "returns"},
}
METRICS = {key: f"actor/{key}" for key in ("pg_loss", "entropy_loss", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower")}
METRICS["kl_loss"] = "kl_loss"


class Verl(VerlSft):
    objectives = ("sft", "grpo", "ppo")
    preload = (__name__,)
    conventions = (
        *(parity.DecaysAll(), parity.SchedulePerRollout(), parity.CountEpsilon(whitening=True)),
        parity.MetricsByMicroBatch(epsilon=1e-8),
    )

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        o = scenario.objective
        if o.kind != "sft" and scenario.data.packed:
            return "verl's micro-batches count samples, not rows; use unpacked rows"
        if o.kind != "sft" and (not o.recompute_old_logprobs or o.rollout_is_threshold):
            return "log-probs of the sampler are not part of this adapter; recompute them"
        return super().refuses(scenario, layout)

    def losses(self) -> dict[str, Callable[..., Any]]:
        g = self.scenario.objective
        if g.kind == "sft":
            return super().losses()
        shared = {"strategy": "fsdp2", "ppo_mini_batch_size": self.scenario.data.rows, "ppo_epochs": g.ppo_epochs}
        shared |= {"ppo_micro_batch_size_per_gpu": self.rows, "rollout_n": 1}
        shared |= {"loss_agg_mode": g.loss_agg_mode, "loss_scale_factor": g.loss_scale_factor}
        actor = FSDPActorConfig(
            **{
                "clip_ratio": g.clip_ratio_low,
                "clip_ratio_low": g.clip_ratio_low,
                "clip_ratio_high": g.clip_ratio_high,
            },
            clip_ratio_c=g.clip_ratio_c or 1e30,  # verl always has one
            **{"use_kl_loss": bool(g.kl_loss_coef), "kl_loss_coef": g.kl_loss_coef, "kl_loss_type": g.kl_loss_type},
            **{"entropy_coeff": g.entropy_coeff, "policy_loss": PolicyLossConfig(loss_mode=g.loss_mode)},
            **shared,
        )
        losses = {"policy": functools.partial(ppo_loss, config=actor)}
        if g.kind == "ppo":
            critic = FSDPCriticConfig(cliprange_value=g.cliprange_value, **shared)
            losses = {"critic": functools.partial(value_loss, config=critic)} | losses  # verl's order of updates
        return losses

    def padded(self, rows: Sequence[parity.Row], *, prompt: int, response: int) -> Any:
        """Returns verl's batch of samples: prompts padded on the left, responses on the right."""
        ids = torch.zeros(len(rows), prompt + response, dtype=torch.long)
        real = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            start = prompt - len(row.documents[0].tokens) + row.target_count
            span = slice(start, start + len(row.documents[0].tokens))
            ids[i, span], real[i, span] = torch.tensor(row.documents[0].tokens), 1
        tensors = {"input_ids": ids, "attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}
        tensors |= {"prompts": ids[:, :prompt], "responses": ids[:, prompt:], "response_mask": real[:, prompt:]}
        return tu.get_tensordict(tensors, {"temperature": self.scenario.objective.temperature})

    def infer(self, role: str, data: Any) -> torch.Tensor:
        """Returns verl's log-probs or values of the responses."""
        data = left_right_2_no_padding(data.clone())
        tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False)
        output = self.workers[role].infer_batch(data)
        numbers: torch.Tensor = no_padding_2_padding(
            tu.get(output, "values" if role == "critic" else "log_probs"), data
        )
        return numbers

    def estimate(self, rows: Sequence[parity.Row], data: Any) -> dict[str, torch.Tensor]:
        """Returns the columns of this rank's batch that verl's controller computes over the rollout of all ranks."""
        g = self.scenario.objective
        keys = {"policy": "old_log_probs", "reference": "ref_log_prob", "critic": "values"}
        found = {keys[role]: self.infer(role, data) for role in self.workers}
        scores = torch.zeros_like(found["old_log_probs"])
        for i, row in enumerate(rows):
            scores[i, row.target_count - 1] = row.documents[0].columns["reward"]
        mine = found | {"token_level_scores": scores, "response_mask": data["response_mask"]}
        mine["uid"] = torch.tensor([row.documents[0].columns["group"] for row in rows])
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        whole = {key: torch.cat([rank[key] for rank in ranks]) for key in mine}
        uid = whole.pop("uid").numpy().astype(object)
        batch = DataProto.from_dict(tensors=whole, non_tensors={"uid": np.array(uid)})
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        if g.kl_coef:
            batch, _ = apply_kl_penalty(batch, kl_ctrl=FixedKLController(g.kl_coef), kl_penalty=g.kl_penalty)
        options: dict[str, Any] = {"adv_estimator": "gae", "gamma": g.gamma}
        if g.kind == "ppo":
            options["lam"] = g.lam
        else:
            options |= {"adv_estimator": g.adv_estimator, "norm_adv_by_std_in_grpo": g.norm_adv_by_std_in_grpo}
        batch = compute_advantage(batch, config=AlgoConfig(gamma=g.gamma), **options)
        own = slice(dist.get_rank() * len(rows), (dist.get_rank() + 1) * len(rows))
        return found | {key: batch.batch[key][own] for key in ("advantages", "returns")}

    def begin_rollout(self, batch: parity.Batch) -> None:
        """Computes what a rollout needs before its first update, and hands verl the whole of it."""
        everything = [row for one in batch.rollout for row in one.rows]
        rows = [row for one in batch.rollout for row in self.own_rows(one)]
        prompt = max(row.length - row.target_count for row in everything)
        data = self.padded(rows, prompt=prompt, response=max(row.target_count for row in everything))
        data.update(self.estimate(rows, data))
        self.loops, self.left = {}, self.scenario.objective.steps_per_rollout
        for role in self.losses():
            whole, size = left_right_2_no_padding(data.clone()), len(batch.rows)
            tu.assign_non_tensor(
                whole,
                **{"calculate_entropy": True, "compute_loss": True, "global_batch_size": size, "mini_batch_size": size},
                **{"epochs": self.scenario.objective.ppo_epochs, "seed": 42, "dataloader_kwargs": {"shuffle": False}},
            )
            self.loops[role] = self._paused(role, whole)

    def _paused(self, role: str, data: Any) -> parity.Paused:
        """Prepares ``train_mini_batch`` of a role, which pauses after each optimizer step with verl's metrics."""
        worker = self.workers[role]
        loop = parity.Paused(lambda pause: worker.train_mini_batch(data))

        def train_batch(mini_batch: Any) -> Any:
            output = type(worker).train_batch(worker, mini_batch)
            loop.pause(dict(tu.get(output, "metrics")))
            return output

        worker.train_batch = train_batch
        self.stack.callback(loop.close)
        return loop

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        if self.scenario.objective.kind == "sft":
            return super().train_step(batch, on_gradients)
        self.on_gradients = on_gradients
        if batch.rollout:
            self.begin_rollout(batch)
        values: dict[str, float] = {}
        rows: dict[str, dict[int, torch.Tensor]] = {}
        self.left -= 1
        for role, loop in self.loops.items():
            self.seen[role] = []
            metrics = loop.resume()
            values |= self.common(role, metrics)
            values |= {key: Metric.aggregate_dp(metrics[name]) for key, name in METRICS.items() if name in metrics}
            rows |= self.columns(role, self.own_rows(batch))
            if not self.left:
                loop.finish()
        return parity.StepMetrics(values={key: float(value) for key, value in values.items()}, rows=rows)

    def columns(self, role: str, rows: Sequence[parity.Row]) -> dict[str, dict[int, torch.Tensor]]:
        """Returns verl's numbers per response token, by row."""
        found: dict[str, dict[int, torch.Tensor]] = {}
        places = iter(rows)
        for outputs, data in self.seen[role]:
            numbers = {key: no_padding_2_padding(outputs[name], data) for key, name in OUTPUTS[role].items()}
            numbers |= {key: data[name] for key, name in COLUMNS[role].items() if name in data}
            for i, mask in enumerate(data["response_mask"].bool()):
                row = next(places)
                for key, padded in numbers.items():
                    found.setdefault(key, {})[row.index] = padded[i][mask]
        return found
