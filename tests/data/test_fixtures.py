"""The built-in models, tokenizer and data are what they claim to be, and can be made again."""

import json
import re
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from conformance.core.host import FIXTURES
from conformance.data.inputs import load_documents
from conformance.data.tokenizer import load_tokenizer
from conformance.models.families import numbers_read
from conformance.oracle.feed_forward import stacked
from conformance.runner.coverage import measure_models
from conformance.spec.scenario import DataConfig, load_scenario
from impl.models.lazy_weights import published_buffers

MODELS = FIXTURES / "models"
FURTHER = [
    *("qwen2", "qwen2-yarn", "llama3", "mistral", "gemma2", "phi3", "olmo2", "seed-oss"),
    *("qwen3-moe", "qwen2-moe", "mixtral", "gpt-oss", "deepseek-v3", "deepseek-v2"),
]
TINY = ["pangu", "llama", "qwen3", "gemma3", *FURTHER]
ODD = [f"{name}-odd" for name in [*TINY] if name not in ("llama", "qwen2")]  # one for each model_type
EVEN = ["llama-even", "llama-even-deep", "llama-even-stages", "llama-even-blocks"]
TIED = {"qwen3", "gemma3", "qwen2", "qwen2-yarn", "llama3", "gemma2", "qwen3-moe", "qwen2-moe", "deepseek-v3"}


@pytest.fixture(scope="module")
def remade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("remade")
    runpy.run_path(str(FIXTURES / "make.py"))["make"](root)
    return root


def load(name: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(MODELS / name, trust_remote_code=True, **options)


# --- made again -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_weights_are_made_again_bit_for_bit(remade: Path, name: str) -> None:
    ours = load_file(MODELS / name / "model.safetensors")
    again = load_file(remade / "models" / name / "model.safetensors")
    assert list(ours) == list(again)
    assert all(torch.equal(ours[n].view(torch.int32), again[n].view(torch.int32)) for n in ours)


@pytest.mark.parametrize(
    "file",
    [
        "data/word_problems.jsonl",
        "data/varied_problems.jsonl",
        "data/long_problems.jsonl",
        "data/preferences.jsonl",
        "data/labelled_answers.jsonl",
        "data/labelled_steps.jsonl",
        "data/documents.jsonl",
        "models/llama/tokenizer.json",
        *(f"models/{n}/config.json" for n in [*TINY, *ODD, *EVEN, "llama-3-8b", "openpangu-embedded-7b", "qwen3-8b"]),
        *(f"models/{name}/random_weights.toml" for name in ["openpangu-embedded-7b", *EVEN, *ODD]),
    ],
)
def test_text_files_are_made_again_byte_for_byte(remade: Path, file: str) -> None:
    assert (remade / file).read_bytes() == (FIXTURES / file).read_bytes()


def test_a_remade_folder_is_complete(remade: Path) -> None:
    def files(root: Path) -> set[str]:
        paths = (p.relative_to(root) for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc")
        return {str(p) for p in paths if p.name != "README.md"}

    assert files(remade / "models") == files(MODELS)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_models_are_small_and_cut_well(name: str) -> None:
    config = AutoConfig.from_pretrained(MODELS / name, trust_remote_code=True)
    assert (MODELS / name / "model.safetensors").stat().st_size < 500_000
    groups = 1 if name.startswith("deepseek") else 2  # keys of latent attention are in no groups
    assert config.num_attention_heads == groups * config.num_key_value_heads == 8
    assert config.vocab_size % 8 == config.intermediate_size % 8 == 0
    assert config.attention_dropout == 0.0
    assert config.tie_word_embeddings is (name in TIED)


@pytest.mark.parametrize("name", TINY)
def test_no_weight_is_neutral_and_no_two_are_alike(name: str) -> None:
    tensors = load_file(MODELS / name / "model.safetensors")
    assert ("lm_head.weight" in tensors) is (name not in TIED)
    for tensor_name, tensor in tensors.items():
        neutral = 1.0 if tensor_name.endswith("norm.weight") and not name.startswith("gemma") else 0.0
        assert tensor.dtype == torch.float32
        assert tensor.std() > 0.05
        assert ((tensor - neutral).abs() > 1e-4).float().mean() > 0.99
    assert len({tuple(t.flatten()[:8].tolist()) for t in tensors.values()}) == len(tensors)


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_gets_a_gradient_that_is_not_trivial(name: str) -> None:
    model = load(name)
    ids = torch.arange(8, 40).unsqueeze(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    norms = {n: p.grad.norm().item() for n, p in model.named_parameters()}
    assert min(norms.values()) > 1e-3
    assert set(norms) | set(published_buffers(model)) == set(stacked(load_file(MODELS / name / "model.safetensors")))


def test_nothing_coincides_in_all_fixtures_of_a_family() -> None:
    measured = measure_models({name: MODELS / name for name in [*TINY, *ODD]})
    assert {one.model: one.in_family for one in measured if one.in_family} == {}
    assert {one.model_type for one in measured} == {one.model_type for one in measured if one.model in ODD}


def test_what_coincides_is_named_until_a_fixture_tells_it_apart(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("first", "second")}
    changed: dict[str, Any] = {"hidden_size": 144, "rms_norm_eps": 1e-3, "num_hidden_layers": 11}
    for folder, changes in zip(folders.values(), ({}, changed), strict=True):
        folder.mkdir()
        config = json.loads((MODELS / "qwen3" / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    (alone,) = measure_models({"first": folders["first"]})
    pair = {one.model: one for one in measure_models(folders)}
    told = {
        "hidden_size = num_attention_heads x head_dim",
        "rms_norm_eps is the default",
        "at most 10 num_hidden_layers",
    }
    kept = {"num_attention_heads = 1 head_dim", "2 divides vocab_size", "initializer_range is the default"}
    assert {*alone.in_family.split(", ")} >= told | kept
    assert alone.coincidences == len(alone.in_family.split(", "))
    for one in pair.values():
        assert {*one.in_family.split(", ")} >= kept
        assert told.isdisjoint(one.in_family.split(", "))


def test_odd_fixtures_have_heads_that_ranks_do_not_divide() -> None:
    heads = [numbers_read(MODELS / name) for name in ODD]
    assert {1, 2, 3} <= {found.get("num_key_value_heads") for found in heads}
    assert {
        rest for found in heads for rest in (found["num_attention_heads"] % 2, found["num_attention_heads"] % 3)
    } == {*range(3)}


def test_gemma3_has_two_kinds_of_attention() -> None:
    config = AutoConfig.from_pretrained(MODELS / "gemma3")
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert 8 <= config.sliding_window <= 16
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert config.query_pre_attn_scalar != config.head_dim
    assert config.attn_logit_softcapping is config.final_logit_softcapping is None


# --- Pangu ------------------------------------------------------------------------------------------------------------


def as_llama(**options: Any) -> Any:
    """The same weights in the class of transformers that the Pangu model is equal to."""
    pangu = json.loads((MODELS / "pangu" / "config.json").read_text())
    for key in ("auto_map", "architectures", "model_type", "bias"):
        del pangu[key]
    config = LlamaConfig(**pangu, attention_bias=True, mlp_bias=False)
    return LlamaForCausalLM.from_pretrained(MODELS / "pangu", config=config, **options)


def test_pangu_has_biases_on_the_attention_projections_only() -> None:
    names = load_file(MODELS / "pangu" / "model.safetensors")
    assert {n.split(".")[-2] for n in names if n.endswith("bias")} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    config = AutoConfig.from_pretrained(MODELS / "pangu", trust_remote_code=True)
    assert (config.model_type, config.bias) == ("PanguEmbedded", True)
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (16e6, 1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("packed", [False, True])
def test_pangu_is_llama_with_biases(attention: str, packed: bool) -> None:
    ids = torch.arange(48).reshape(2, 24) * 5 % 256 + 8
    positions = torch.cat([torch.arange(9), torch.arange(15)]).unsqueeze(0) if packed else None
    logits, gradients = [], []
    for model in (load("pangu", attn_implementation=attention), as_llama(attn_implementation=attention)):
        output = model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False)
        output.loss.backward()
        logits.append(output.logits)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-6)
    assert list(gradients[0]) == list(gradients[1])
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).norm() <= 1e-6 * gradient.norm(), name


def test_pangu_keeps_packed_documents_apart() -> None:
    model = load("pangu")
    first, second = torch.arange(10, 19).unsqueeze(0), torch.arange(50, 65).unsqueeze(0)
    positions = torch.cat([torch.arange(9), torch.arange(15)]).unsqueeze(0)
    packed = model(torch.cat([first, second], dim=1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, 9:], model(second, use_cache=False).logits, rtol=0, atol=1e-5)


def test_pangu_gradient_checkpointing_changes_nothing() -> None:
    plain, checkpointed = load("pangu").train(), load("pangu").train()
    checkpointed.gradient_checkpointing_enable()
    ids = torch.arange(8, 40).unsqueeze(0)
    for model in (plain, checkpointed):
        model(input_ids=ids, labels=ids).loss.backward()
    for ours, theirs in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_pangu_generates_what_llama_generates() -> None:
    prompt = torch.arange(8, 16).unsqueeze(0)
    ours, theirs = (m.generate(prompt, max_new_tokens=4, do_sample=False) for m in (load("pangu"), as_llama()))
    assert torch.equal(ours, theirs)


def test_pangu_carries_llamas_tensor_parallel_plan() -> None:
    config = AutoConfig.from_pretrained(MODELS / "pangu", trust_remote_code=True)
    assert config.base_model_tp_plan == LlamaConfig.base_model_tp_plan
    assert load("pangu")._tp_plan == as_llama()._tp_plan


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    [
        ("openpangu-embedded-7b", 8.03e9, 34),
        ("openpangu-embedded-1b", 1.16e9, 26),
        ("llama-3-8b", 8.03e9, 32),
        ("qwen3-8b", 8.19e9, 36),
    ],
)
def test_full_size_configurations_build_with_the_same_code(
    tmp_path: Path, name: str, parameters: float, layers: int
) -> None:
    shutil.copytree(MODELS / name, tmp_path, dirs_exist_ok=True)
    for code in (MODELS / "pangu").glob("*.py"):
        shutil.copy(code, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert (config.num_hidden_layers, config.head_dim) == (layers, 128)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)


# --- tokenizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_any_text_survives_the_tokenizer(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name, trust_remote_code=True)
    text = " Zoë: 7 ÷ 8,\n\t安 ☃ 🙂  don't .  "
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) <= len(text.encode())
    assert len(tokenizer) == AutoConfig.from_pretrained(MODELS / name, trust_remote_code=True).vocab_size


def test_frequent_pairs_of_bytes_are_tokens_all_over_the_vocabulary() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "llama")
    pairs = [i for i in range(8, 400) if len(tokenizer.convert_ids_to_tokens(i)) == 2]
    assert len(pairs) == 400 - 8 - 256
    assert all(10 < sum(i // 56 == part for i in pairs) < 28 for part in range(7))


@pytest.mark.parametrize("name", TINY)
def test_the_chat_template_marks_turns_and_their_end(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name, trust_remote_code=True)
    chat = [{"role": "user", "content": "2 plus 3?"}, {"role": "assistant", "content": "It is 5."}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<bos><|user|>2 plus 3?<|assistant|>It is 5.<eos>"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


# --- data -------------------------------------------------------------------------------------------------------------

# What a question asks, computed from its numbers alone.
MEANING: dict[str, Callable[..., int]] = {
    r"(\d+) plus (\d+)\?": lambda a, b: a + b,
    r"(\d+) minus (\d+)\?": lambda a, b: a - b,
    r"Sum of (\d+), (\d+) and (\d+)\?": lambda a, b, c: a + b + c,
    r"\w+ has (\d+) \w+, gets (\d+)\. Total\?": lambda a, b: a + b,
    r"\w+ had (\d+) \w+ and lost (\d+)\. Left\?": lambda a, b: a - b,
    r"(\d+) boxes of (\d+) \w+\. How many\?": lambda a, b: a * b,
    r"\w+ shares (\d+) \w+ among (\d+)\.": lambda a, b: a // b,
    r"A train runs (\d+) km/h for (\d+) h\. How far\?": lambda a, b: a * b,
    r"(\d+) \w+ at (\d+), paid (\d+)\. Change\?": lambda a, b, c: c - a * b,
    r"Half of (\d+), plus (\d+)\?": lambda a, b: a // 2 + b,
    r"(\d+) and (<\S+>) make (\d+)\. How much is \2\?": lambda a, c: c - a,
    r"Code points of . . (.)\?": ord,
    r"Count from (\d+) to (\d+) by (\d+)\.": lambda a, b, c: b,
}
OPERATION: dict[str, Callable[[int, int], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def problems() -> Iterator[tuple[str, str]]:
    for line in (FIXTURES / "data" / "word_problems.jsonl").read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        yield problem["question"], problem["answer"]


def test_every_answer_is_right() -> None:
    for question, answer in problems():
        numbers, expected = next(
            ([int(n) if n.isascii() and n.isdecimal() else n for n in match.groups() if "<" not in n], meaning)
            for pattern, meaning in MEANING.items()
            if (match := re.fullmatch(pattern, question))
        )
        assert int(re.findall(r"\d+", answer)[-1]) == expected(*numbers), question


def test_every_step_that_an_answer_shows_is_right() -> None:
    for question, answer in problems():
        for a, sign, b, result in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", answer):
            assert OPERATION[sign](int(a), int(b)) == int(result), question


def lengths(file: str) -> list[int]:
    """Of the documents, in tokens."""
    data = DataConfig(path=f"data/{file}.jsonl", max_len=4096)
    return sorted(len(d.tokens) for d in load_documents(data, load_tokenizer(MODELS / "llama")))


def test_problems_are_many_different_and_ragged_most_of_them_short() -> None:
    pairs = list(problems())
    assert len({question for question, _ in pairs}) == len(pairs) == 600
    assert any(not question.isascii() for question, _ in pairs)
    tokens = lengths("word_problems")
    assert len(set(tokens)) > 50
    assert sum(20 <= length <= 60 for length in tokens) > 0.7 * len(pairs)
    assert sum(length > 96 for length in tokens) > 0.02 * len(pairs), "rows of sft-padded cut some of them"
    assert tokens[0] + tokens[-1] <= 160, "and rows of sft-packed hold another beside any of them"


def test_long_problems_are_one_for_each_row_of_sft_long() -> None:
    scenario = load_scenario(FIXTURES / "scenarios" / "sft-long.toml", model="models/llama", precision="exact")
    tokens = lengths("long_problems")
    assert len(tokens) == scenario.steps * scenario.data.rows
    assert 1024 < tokens[-2] < scenario.data.max_len < tokens[-1]
    assert sum(length > 256 for length in tokens) == 5
