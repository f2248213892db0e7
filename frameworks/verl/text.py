"""Shows verl's text stages: MultiTurnSFTDataset, the sampler and loader of its SFT trainer, and dynamic batches."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas
import torch
from torch.utils.data import DistributedSampler

import parity

with parity.on_cpu(stand_ins=("vllm",)):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import AutoTokenizer
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
    from verl.utils.seqlen_balancing import rearrange_micro_batches


class Verl:
    """Tokenizes each message by itself. Its check compares them with the whole conversation, and raises by default."""

    ignores_mismatch = False

    @classmethod
    def describe(cls) -> parity.TextInfo:
        return parity.TextInfo(
            name=f"verl{'-unchecked' * cls.ignores_mismatch}",
            packages=("verl", "transformers", "torchdata"),
            trains=("scaffold", "content", "end", "space"),
            drops_last=True,
        )

    def load(self, folder: Path, template: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], max_len: int) -> dict[str, Any]:
        row = {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
        config = {"max_length": max_len, "truncation": "right", "pad_mode": "no_padding"}
        config["ignore_input_ids_mismatch"] = self.ignores_mismatch
        with tempfile.TemporaryDirectory() as folder:
            pandas.DataFrame([row]).to_parquet(file := f"{folder}/one.parquet")
            found = MultiTurnSFTDataset(file, self.tokenizer, config)[0]
        return {"tokens": found["input_ids"].tolist(), "targets": found["loss_mask"].bool().tolist()}

    def pack(self, documents: Sequence[Mapping[str, Any]], max_len: int) -> list[dict[str, Any]]:
        raise parity.NotSupported("does not pack documents into rows; padding is removed in the model")

    def order(self, plan: parity.OrderPlan) -> list[list[list[list[int]]]]:
        """Builds sampler and loader as sft_trainer.py does; a resume gives the loader's state to another one."""
        ranks = []
        for rank in range(plan.ranks):
            epochs: list[list[list[int]]] = []
            sampler, loader = self.loader(plan, rank)
            for epoch in range(plan.epochs):
                sampler.set_epoch(epoch)
                if plan.after and not epoch:
                    before = iter(loader)
                    for _ in range(plan.after):
                        next(before)
                    state = loader.state_dict()
                    sampler, loader = self.loader(plan, rank)
                    sampler.set_epoch(epoch)
                    loader.load_state_dict(state)
                epochs.append([step.tolist() for step in loader])
            ranks.append(epochs)
        return [[epochs[number] for epochs in ranks] for number in range(plan.epochs)]

    def loader(self, plan: parity.OrderPlan, rank: int) -> tuple[DistributedSampler[int], Any]:
        samples = range(plan.samples)
        sampler = DistributedSampler(
            samples, num_replicas=plan.ranks, rank=rank, shuffle=plan.shuffles, seed=plan.seed, drop_last=True
        )
        return sampler, StatefulDataLoader(samples, batch_size=plan.rows, sampler=sampler, drop_last=True)

    def micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        from tensordict import TensorDict

        places = torch.arange(max(lengths))
        mask = (places < torch.tensor(lengths)[:, None]).long()
        batch = TensorDict({"input_ids": mask, "attention_mask": mask}, batch_size=len(lengths))
        return [[int(i) for i in one] for one in rearrange_micro_batches(batch, max_tokens)[1]]


class VerlUnchecked(Verl):
    """Trains on the messages as they were tokenized, whether or not they are the template's conversation."""

    ignores_mismatch = True
