"""Bases of adapters: whole trainings by a Hugging Face Trainer, step by step, and the rows of TRL's GRPOTrainer."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import parity
from conformance.spec.scenario import ScheduleConfig, load_scenario

FIXTURES = Path(__file__).parents[2] / "fixtures" / "scenarios"
LAYOUT = parity.Layout(dp=1)
COSINE = ScheduleConfig(name="cosine", total_steps=3)


def scenario(name: str, **changes: Any) -> parity.Scenario:
    return replace(load_scenario(FIXTURES / f"{name}.toml", model="llama", precision="fp32"), **changes)


def batch(step: int) -> parity.Batch:
    """Four rows of different lengths, of which one has no target."""
    lengths = ((5, 3), (4, 4), (6, 1), (3, 2))
    rows = [
        parity.Row(i, (parity.Document(tuple(range(step, step + n)), tuple(at >= first for at in range(n))),))
        for i, (n, first) in enumerate(lengths)
    ]
    return parity.Batch(step, 8, tuple(rows))


class Toy(parity.TrainerAdapter):
    def setup(self, scenario: parity.Scenario) -> dict[str, Any]:
        from transformers import Trainer, TrainingArguments  # takes long, and other workers of pytest do not need it

        class Shown(Trainer):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
                self.adapter.seen.append(parity.label_logprobs(outputs.logits, inputs["labels"]))
                return loss

        torch.manual_seed(0)
        shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **shape))
        args = TrainingArguments(**self.options(scenario, LAYOUT, "cpu"))
        self.trainer = self.paused(Shown)(model, args, data_collator=lambda rows: parity.flatten(rows).as_inputs)
        return self.start()

    def example(self, row: parity.Row) -> parity.Row:
        return row


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def weights(adapter: parity.TrainerAdapter) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in adapter.named_tensors("weight", "policy")}


def test_a_training_is_stepped_saved_and_resumed_to_its_end(tmp_path: Path) -> None:
    given, toy, shown = scenario("core-sft-accumulation", accumulation=2, schedule=COSINE), Toy(), list[torch.Tensor]()
    toy.setup(given)

    def on_gradients(model: str) -> None:
        shown.append(torch.cat([gradient.flatten() for _, gradient in toy.named_tensors("gradient", model)]))

    for step in range(3):
        found = toy.train_step(batch(step), on_gradients)
        assert len(shown) == step + 1  # of the whole step, before clipping
        logprobs = torch.cat([found.rows["logprob"][row.index] for row in batch(step).rows])
        assert found.values["token_count"] == len(logprobs) == 8
        assert found.values["loss"] == pytest.approx(-logprobs.mean().item(), rel=1e-3)  # the log has four digits
        assert found.values["grad_norm"] == pytest.approx(shown[-1].norm().item(), rel=1e-4)
        assert found.values["lr"] == pytest.approx(given.optimizer.lr * COSINE.factor(step))
        if step == 1:
            (tmp_path / "saved").mkdir()
            toy.save(tmp_path / "saved")
    ended = weights(toy)
    again = Toy()
    again.setup(given)
    again.load(tmp_path / "saved")
    again.train_step(batch(2), lambda _: None)
    torch.testing.assert_close(weights(again), ended, rtol=0, atol=0)
    for one in (toy, again):
        loop = one.loop
        one.teardown()
        assert not loop.running


def test_a_trainer_that_counts_no_tokens_differs() -> None:
    toy = Toy()
    toy.setup(scenario("core-sft-accumulation", accumulation=2))
    toy.trainer.model_accepts_loss_kwargs = False  # each micro-batch is divided by its own tokens
    assert math.isnan(toy.train_step(batch(0), lambda _: None).values["token_count"])
    folder = Path(toy.trainer.args.output_dir)
    assert folder.is_dir()
    toy.teardown()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "changes", "layout", "reason"),
    [
        ("core-sft-plain", {}, parity.Layout(dp=1, tp=2), "use dp2"),
        ("core-sft-cosine", {"steps": 7}, LAYOUT, "as many schedule.total_steps as steps"),
        ("core-sft-plain", {"steps": 70}, LAYOUT, ""),  # a constant rate has no end
        ("core-sft-plain", {"router_z_loss": 0.1}, LAYOUT, "z-loss"),
    ],
)
def test_a_trainer_refuses(name: str, changes: dict[str, Any], layout: parity.Layout, reason: str) -> None:
    answer = parity.TrainerAdapter.supports(scenario(name, **changes), layout)
    assert answer == parity.Supported() if not reason else reason in answer.reason  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, {"loss_type": "dapo", "num_iterations": 2, "scale_rewards": "none", "epsilon": 0.99, "delta": 60.0}),
        ({"loss_mode": "gspo"}, {"importance_sampling_level": "sequence", "loss_type": "dapo"}),
        ({"loss_mode": "cispo", "clip_ratio_low": 1.0}, {"loss_type": "cispo", "epsilon_high": 51.0, "delta": None}),
        ({"norm_adv_by_std_in_grpo": True}, {"scale_rewards": "group"}),
        ({"mini_batches": 2}, {"steps_per_generation": 2}),
        ({"loss_agg_mode": "seq-mean-token-sum"}, "no seq-mean-token-sum with vanilla"),
        ({"loss_mode": "cispo"}, "use clip_ratio_low = 1.0"),
        ({"kl_coef": 0.1}, "no KL per token in rewards"),
    ],
)
def test_grpo_is_configured_as_trl_names_it(change: dict[str, Any], wanted: Any) -> None:
    plain: Any = scenario("core-grpo-plain")
    asked = replace(plain, objective=replace(plain.objective, **change))
    answer = parity.GrpoTrainerAdapter.supports(asked, LAYOUT)
    if isinstance(wanted, str):
        assert wanted in answer.reason  # type: ignore[union-attr]
        return
    assert answer == parity.Supported()
    options = parity.GrpoTrainerAdapter().options(asked, LAYOUT, "cpu")
    assert {key: options[key] for key in wanted} == wanted


def test_numbers_of_responses_come_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    grpo, one = parity.GrpoTrainerAdapter(), batch(0)
    grpo.prompt = {"prompt": ""}  # type: ignore[misc]
    grpo.scenario, grpo.layout = scenario("core-grpo-accumulation", accumulation=2), LAYOUT
    grpo.trainer = SimpleNamespace(accelerator=SimpleNamespace(reduce=lambda count: count))
    parts = (
        ([[1, 1, 0], [0, 0, 0]], [[1.0, 2.0, 9.0], [9.0] * 3]),
        ([[1] * 5, [0, 1, 0, 0, 0]], [[3.0] * 5, [4.0] * 5]),
    )

    def step(prompts: list[list[Any]], on_gradients: Any) -> dict[str, float]:
        assert prompts == [[{"prompt": ""}] * 4] * 2
        grpo.seen = [(torch.tensor(mask), {"logprob": torch.tensor(p), "entropy": None}) for mask, p in parts]
        return {"loss": 1.0, "token_count": 99.0}

    monkeypatch.setattr(grpo, "step", step)
    found = grpo.train_step(replace(one, rollout=(one,)), lambda _: None)
    assert found.values == {"loss": 1.0, "token_count": 8}  # of the masks, not of the Trainer
    assert {index: row.tolist() for index, row in found.rows["logprob"].items()} == {
        **{0: [1.0, 2.0], 1: []},
        **{2: [3.0] * 5, 3: [4.0]},
    }
    assert found.rows.keys() == {"logprob"}
