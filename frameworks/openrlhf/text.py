"""Shows OpenRLHF's text stages: SFTDataset with and without ``multiturn``, its sampler, and dynamic batches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer

import parity

with parity.on_cpu(stand_ins=("vllm", "ring_flash_attn")):
    from openrlhf.datasets.sft_dataset import SFTDataset
    from openrlhf.utils.distributed_sampler import DistributedSampler
    from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions
    from torchdata.stateful_dataloader import StatefulDataLoader

disable_progress_bars()


class OpenRlhf:
    """Trains on all answers (``--data.multiturn``)."""

    multiturn = True

    @classmethod
    def describe(cls) -> parity.TextInfo:
        return parity.TextInfo(
            name=f"openrlhf{'-last' * (not cls.multiturn)}",
            packages=("openrlhf", "transformers", "torchdata"),
            trains=("scaffold", "content", "end", "space") if cls.multiturn else ("scaffold", "content", "end"),
            turns="all" if cls.multiturn else "last",
            truncates="end, with an end token, or left out",
            strips_end=True,
            drops_last=True,
        )

    def load(self, folder: Path, template: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], max_len: int) -> dict[str, Any]:
        data = SimpleNamespace(input_key="messages", output_key=None, apply_chat_template=True)
        strategy = SimpleNamespace(args=SimpleNamespace(data=data))
        rows = Dataset.from_list([{"messages": list(messages)}])
        options = {"num_processors": None, "multiturn": self.multiturn}
        found = SFTDataset(rows, self.tokenizer, max_len, strategy, **options)
        if not len(found):
            return {}
        tokens, _, mask = found[0]
        return {"tokens": tokens[0].tolist(), "targets": [False, *mask[0, :-1].bool().tolist()]}  # of the next token

    def pack(self, documents: Sequence[Mapping[str, Any]], max_len: int) -> list[dict[str, Any]]:
        raise parity.NotSupported("does not pack documents into rows; a micro-batch is flattened in the model")

    def order(self, plan: parity.OrderPlan) -> list[list[list[list[int]]]]:
        """Builds sampler and loader as ``setup_dataloader`` does; a resume tells the sampler the consumed samples."""
        epochs = []
        for epoch in range(plan.epochs):
            consumed = plan.after * plan.ranks * plan.rows * (not epoch)
            epochs.append([self.steps(plan, rank, epoch, consumed) for rank in range(plan.ranks)])
        return epochs

    def steps(self, plan: parity.OrderPlan, rank: int, epoch: int, consumed: int) -> list[list[int]]:
        samples = range(plan.samples)
        sampler = DistributedSampler(
            samples, plan.ranks, rank, shuffle=plan.shuffles, seed=plan.seed, drop_last=plan.drops_last
        )
        sampler.set_epoch(epoch, consumed_samples=consumed)
        loader = StatefulDataLoader(samples, batch_size=plan.rows, sampler=sampler, drop_last=plan.drops_last)
        return [step.tolist() for step in loader]

    def micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        count = get_minimum_num_micro_batch_size(list(lengths), max_tokens, 1, 1)
        return [list(one) for one in get_seqlen_balanced_partitions(list(lengths), count, equal_size=False)]


class OpenRlhfLast(OpenRlhf):
    """Trains on the last answer."""

    multiturn = False
