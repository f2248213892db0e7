"""Names of the options of ``parity train``: recipes, misspelt options, and options of other frameworks."""

import re
from pathlib import Path
from typing import Any

import pytest
from train_runs import TINY, config_of

from conformance.core.errors import UsageError
from impl.train.command import FOREIGN, read_recipe
from impl.train.flags import FLAGS


def test_a_recipe_has_the_names_of_the_options_and_the_command_line_comes_first(tmp_path: Path) -> None:
    toml, yml = tmp_path / "recipe.toml", tmp_path / "recipe.yaml"
    toml.write_text('pretrain = "models/pangu"\nmax_steps = 4\ndevice = "cpu"\nlearning_rate = 1e-5\noffload = true\n')
    yml.write_text("pretrain: models/pangu\nmax_steps: 4\ndevice: cpu\nlearning_rate: 1e-5\noffload: true\n")
    for recipe in (toml, yml):  # YAML 1.1 takes 1e-5 for a text
        config = config_of("sft", "fsdp2", "--config", str(recipe))
        assert (config.scenario.optimizer.lr, str(config.layout)) == (1e-5, "dp1.offload")
        config = config_of("sft", "fsdp2", "--config", str(recipe), "--learning-rate", "0.5", "--no-offload")
        assert (config.scenario.optimizer.lr, str(config.layout)) == (0.5, "dp1")
        assert config.options["max_steps"] == 4


def test_the_command_line_comes_first_also_under_another_name(tmp_path: Path) -> None:
    recipe, data = tmp_path / "recipe.toml", tmp_path / "data.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "2"}\n' * 64)
    sizes = "fsdp_tensor_parallel_size = 2\ncontext_parallel_size = 2"
    recipe.write_text(f'pretrain = "models/pangu"\nmax_steps = 4\ndevice = "cpu"\n{sizes}\n')
    said = ("--config", str(recipe), "--dataset", str(data))
    assert str(config_of("sft", "fsdp2", *said).layout) == "tp2.sp2.plan"
    other = config_of("sft", "megatron", *said, "--tensor-model-parallel-size", "4", "--ring-attn-size", "1")
    assert (str(other.layout), other.scenario.steps) == ("tp4", 4)
    assert "fsdp_tensor_parallel_size" not in other.options
    assert config_of("sft", "fsdp2", *said, "--max-epochs", "3").scenario.steps == 6
    recipe.write_text(recipe.read_text().replace("max_steps = 4", "max_epochs = 3"))
    assert config_of("sft", "fsdp2", *said, "--max-steps", "5").scenario.steps == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learnin_rate: 1", "did you mean learning_rate"),
        ("kl_coef: 0.1", "of grpo and ppo, not of sft"),
        ("max_steps: many", "max_steps must be a whole number, got 'many'"),
        ("max_steps: 1.5", "a whole number"),
        ("max_steps: true", "a whole number"),
        ("offload: 1", "true or false"),
        ("backend: fdsp2", "one of deepspeed, fsdp2, megatron"),
        ("pretrain: [a]", "a text"),
        ("trust_remote_code: true", "use the option --trust-remote-code"),
        ("- 1", "options"),
        ("a: [", "not valid YAML"),
        ("!!python/object/apply:os.system [true]", "not valid YAML"),
    ],
)
def test_a_recipe_that_is_wrong_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(UsageError, match=said) as error:
        read_recipe(recipe, "sft")
    assert "recipe.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("--learnin-rate 1", "did you mean --learning-rate"),
        ("--learning 1", "did you mean --learning-rate"),  # no abbreviations
        ("--kl-coef 1", "of grpo and ppo, not of sft"),
        ("--max-steps many", "invalid int value"),
        ("--per_device_train_batch_size 1", "is --micro-train-batch-size"),
        ("--num-generations 4", "--n-samples-per-prompt is an option of grpo and ppo, not of sft"),
        ("--num_train_epochs=2", "is --max-epochs"),
        ("--optim.lr 1", "is --learning-rate"),
        ("trainer.total_training_steps=1", "is --max-steps"),
        ("+data.train_files=x.parquet", "is --dataset"),
        ("--actor_rollout_ref.actor.optim.weight_decay 1", "is --weight-decay"),
    ],
)
def test_an_unknown_option_is_wrong_usage(said: str, told: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        config_of("sft", "fsdp2", *TINY, *said.split())
    assert end.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size", r"--train-batch-size \(which counts responses"),
        ("data.train_batch_size", "--rollout-batch-size$"),
        ("num_train_epochs", "--num-episodes$"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "every rank samples from a whole replica"),
    ],
)
def test_foreign_option_is_answered_with_its_own_name(name: str, own: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        config_of("grpo", "fsdp2", *TINY, f"--{name}=1")
    assert re.search(own, capsys.readouterr().err.strip())


def test_recipe_with_foreign_key_is_answered_in_its_own_names(tmp_path: Path) -> None:
    (recipe := tmp_path / "trl.yaml").write_text("num_generations: 4\n")
    with pytest.raises(UsageError, match=r"in parity train this is n_samples_per_prompt$"):
        read_recipe(recipe, "grpo")


def test_foreign_names_lead_to_existing_options() -> None:
    own = {each for to in FOREIGN.values() for each in to.partition(", ")[0].split("|") if each}
    assert own <= FLAGS.keys()
    for name in FOREIGN.keys() & FLAGS.keys():  # a command that has the option never answers with another one
        assert not {*FLAGS[name].commands} & {*FLAGS[FOREIGN[name]].commands}
