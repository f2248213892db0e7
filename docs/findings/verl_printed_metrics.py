"""verl: clip fractions and the KL to the old policy are means of the means of micro-batches.

One process, CPU. Exit code 0: defect present (one token with KL 0.4 and three with KL 0 in two micro-batches give 0.2,
and not 0.1). 1: gone. See verl-printed-metrics.md.
"""

import sys

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPActorConfig


def metrics_of(kl: list[float], config: FSDPActorConfig) -> dict[str, Metric]:
    """Returns what ``ppo_loss`` keeps of a micro-batch with one response, whose tokens have this KL."""
    old = torch.zeros(1, len(kl))
    ones = torch.ones(1, len(kl))
    _, metrics = compute_policy_loss_vanilla(
        old_log_prob=old, log_prob=-torch.tensor([kl]), advantages=-ones, response_mask=ones, config=config
    )
    kept: dict[str, Metric] = Metric.from_dict(metrics, aggregation=AggregationType.MEAN)
    return kept


def main() -> int:
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=4, global_batch_size=2, loss_scale_factor=None)
    micro_batches = [[0.4], [0.0, 0.0, 0.0]]
    found = [metrics_of(kl, config) for kl in micro_batches]
    tokens = sum(len(kl) for kl in micro_batches)
    wrong = False
    for key, over_tokens in (("actor/ppo_kl", 0.4 / tokens), ("actor/pg_clipfrac", 1 / tokens)):
        of_rank = Metric(AggregationType.MEAN)
        for one in found:
            of_rank.append(one[key])
        printed = Metric.aggregate_dp([of_rank])
        print(f"{key}: printed {printed:.3f}, mean over tokens {over_tokens:.3f}")
        wrong |= abs(printed - over_tokens) > 1e-3
    return 0 if wrong else 1


if __name__ == "__main__":
    sys.exit(main())
