"""Prepares the model folders that the oracle and every backend load, with their LoRA adapters.

Weights come from a file, never from a random seed on each rank. With seed 0 the policy is the given model. For another
seed, and for every other role, the weights are perturbed. So no result depends on a single set of weights, and a
backend that confuses two roles computes different numbers.

Adapters are files in peft's format, and no number in them is neutral. A usual adapter begins with B = 0, so a backend
that leaves it out or scales it twice would compute the same numbers until the first update.
"""

import contextlib
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from conformance.core.errors import UsageError, first_few, one_line, shown
from conformance.core.host import resolve
from conformance.core.io import is_file, read_json
from conformance.models.folder_checks import NOT_COPIED, check_model_folder
from conformance.spec.observables import POLICY, Role
from conformance.spec.scenario import ADAPTER, CONFIG_FILE, FILE_PREFIX, WEIGHTS_FILE, LoraConfig, Scenario

B_SIZE = 0.2  # of B x for x of size 1; at the usual scales an adapter adds a third of the layer's own output
# Names of these numbers in configurations: first of most models, then of GPT-2, GPT-Neo, MPT and others.
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_KINDS = ("layers_block_type", "layer_types")  # lists with an entry for each layer
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def write_adapter(folder: Path, lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]], *, key: str) -> None:
    """Writes the adapter of a model with parameters of these ``shapes`` into ``folder``; ``key`` seeds its numbers.

    Raises UsageError for a target that the model does not have.
    """
    targets = lora.targets(shapes)
    tensors = {}
    for target in targets:
        rows, columns = shapes[f"{target}.weight"]
        a, b = f"{target}.lora_A.weight", f"{target}.lora_B.weight"
        tensors[a] = _normal((lora.r, columns), f"{key} {a}") / columns**0.5
        tensors[b] = _normal((rows, lora.r), f"{key} {b}") * B_SIZE / lora.r**0.5
    write_adapter_files(folder, lora, targets, tensors)


def adapter_config(lora: LoraConfig, targets: Sequence[str]) -> dict[str, Any]:
    """Returns the content of CONFIG_FILE, with peft's keys."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "use_rslora": lora.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }


def write_adapter_files(
    folder: Path, lora: LoraConfig, targets: Sequence[str], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Writes an adapter in peft's format, in float32, into the new ``folder``."""
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(adapter_config(lora, targets), indent=2), encoding="utf-8")
    save_file({FILE_PREFIX + name: t.float() for name, t in tensors.items()}, folder / WEIGHTS_FILE)


def _normal(shape: tuple[int, int], key: str) -> torch.Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# Output embeddings, which a value model lacks. GPT-NeoX calls it embed_out, and Phi's has a bias.
HEADS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")
VALUE_HEAD, VALUE_FILE = "score.weight", "value-head.safetensors"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
FLOATS = ("F64", "F32", "F16", "BF16")


def prepare_model(scenario: Scenario, role: Role, out: Path) -> Path:
    """Writes the model of one role of the scenario's objective into the new or empty folder ``out``; returns ``out``.

    Configuration, tokenizer and code are copied. For the policy with seed 0, the weight files are symbolic links. For
    other seeds and roles, every weight is multiplied by 1 + noise and keeps its dtype; the noise is uniform in
    [-role.noise, role.noise] and depends on the seed, the role and the name of the tensor. A value model has
    ``score.weight`` (1, hidden) instead of the output embedding, and the configuration of transformers' sequence
    classification with one label. With LoRA, the policy's adapter is written into the folder ADAPTER of ``out``, the
    base is rounded to bf16, and a frozen reference is the base without the adapter. Weights are rounded to bf16 as well
    if parameters are stored in it.

    Raises UsageError for an unusable folder (see ``check_model_folder``) or one without safetensors weights, for an
    adapter that does not fit the model, and if ``out`` contains files.
    """
    model = resolve(scenario.model)
    check_model_folder(model)
    files = weight_files(model)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise UsageError(f"{out} is not empty, and its files are not overwritten; give a new folder")
    shutil.copytree(model, out, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
    is_rounded = is_base_of(scenario, role) or scenario.tier.stored is not None
    key = key_of(scenario, role)
    if scenario.lora and role == POLICY:
        write_adapter(out / ADAPTER, scenario.lora, weight_shapes(model), key=key)
    twins = _twins(files)
    for file in files:
        is_as_given = role.head == "causal" and key == "0"  # a value model has no head for logits
        if is_as_given and not (is_rounded and _has_more_digits(file)):
            (out / file.name).symlink_to(file)
        else:
            _perturb(file, out / file.name, key=key, twins=twins, role=role, rounded=is_rounded)
    if role.head == "value":
        _make_value_model(out, key=key)
    return out


def is_base_of(scenario: Scenario, role: Role) -> bool:
    """Tells whether a role's weights are the base of adapters: the policy's, and those of a frozen reference."""
    return scenario.lora is not None and (role == POLICY or not role.trained)


def key_of(scenario: Scenario, role: Role) -> str:
    """Returns the key that seeds a role's numbers: scenario seed and role. All roles share the key of a base."""
    return f"{scenario.seed} {'' if is_base_of(scenario, role) else role.prefix}".strip()


def value_config(file: Path) -> int:
    """Turns the configuration of a language model into that of a value model; returns the hidden size.

    Raises UsageError if the file does not state the hidden size.
    """
    config = read_json(file)
    classifier = "ForSequenceClassification"
    names = [re.sub("ForCausalLM|LMHeadModel", classifier, name) for name in config.get("architectures") or ()]
    config |= {"architectures": names, "num_labels": 1, "tie_word_embeddings": False}
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    text = config.get("text_config", config)
    if not (hidden := next((size for key in ("hidden_size", "n_embd", "d_model") if (size := text.get(key))), None)):
        raise UsageError(f"{file} lacks hidden_size, which a value model needs; add it")
    return int(hidden)


def value_head(folder: Path, *, key: str) -> torch.Tensor:
    """Makes a folder's configuration that of a value model, and returns the weight of its head, (1, hidden)."""
    hidden = value_config(folder / "config.json")
    head = torch.randn(1, hidden, generator=generator_of(f"{key} {VALUE_HEAD}"), dtype=torch.float64) / hidden**0.5
    return head.float()  # type: ignore[no-any-return]


def _make_value_model(folder: Path, *, key: str) -> None:
    """Turns a language model without an output embedding into a value model."""
    head = value_head(folder, key=key)
    shards = folder / INDEX
    name = VALUE_FILE if shards.is_file() else "model.safetensors"
    tensors = {} if shards.is_file() else load_file(folder / name)
    _write({**tensors, VALUE_HEAD: head}, folder / name, metadata={"format": "pt"})
    if shards.is_file():
        index = read_json(shards)
        kept = {n: where for n, where in index["weight_map"].items() if not n.endswith(HEADS)}
        index["weight_map"] = {**kept, VALUE_HEAD: name}
        shards.write_text(json.dumps(index), encoding="utf-8")


def has_weights(model: Path) -> bool:
    """Tells whether a Hugging Face folder has safetensors weights, whole or not."""
    return (model / INDEX).exists() or (model / SINGLE).is_file()


def weight_files(model: Path) -> list[Path]:
    """Returns the safetensors files with the weights of a Hugging Face folder.

    Raises UsageError if there are none, or if the index names something that is not a safetensors file of the folder.
    """
    index = model / INDEX
    if not index.exists():
        if not (model / SINGLE).is_file():
            raise UsageError(
                f"{model} has no {SINGLE} and no {INDEX}; convert its weights with "
                f"transformers.AutoModelForCausalLM.from_pretrained({str(model)!r}).save_pretrained(NEW_FOLDER), "
                f"copy the tokenizer files there and use NEW_FOLDER as the model"
            )
        return [model / SINGLE]
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UsageError(f"{index} has no weight_map from names of tensors to files; download the folder again")
    for name in where.values():
        if not isinstance(name, str) or Path(name).name != name or not re.fullmatch(r"[^.].*\.safetensors", name):
            raise UsageError(f"{index} must name safetensors files of the folder, got {shown(name)}")
    names = sorted(set(where.values()))
    if missing := [shown(name) for name in names if not is_file(model / name)]:
        raise UsageError(f"{model} lacks {first_few(missing, most=8)}, which {INDEX} names; download the folder again")
    return [model / name for name in names]


def weight_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a Hugging Face folder, by name, from the headers of the files.

    Raises UsageError for a broken file, a tensor that is not floating-point, and a tensor that is in two files.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(model):
        try:
            with safe_open(file, framework="pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
                found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: larger than what can be mapped
            raise UsageError(
                f"{file} is not a readable safetensors file: {one_line(error)}; copy or download it again"
            ) from None
        for name, (shape, dtype) in found.items():
            if dtype not in FLOATS:
                raise UsageError(f"{file} holds {name} as {dtype}; weights must be one of {', '.join(FLOATS)}")
            if name in shapes:
                raise UsageError(f"{file} and another file of the folder both hold {name}; remove one of them")
            shapes[name] = shape
    return shapes


def named_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a Hugging Face folder by their names."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118


def check_finite(file: Path) -> None:
    """Raises UsageError for a tensor of a safetensors file with numbers that are not finite.

    What cannot be read is left to ``weight_shapes``.
    """
    with contextlib.suppress(SafetensorError, OSError, RuntimeError), safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            if tensors.get_slice(name).get_dtype() not in FLOATS:
                continue
            tensor = tensors.get_tensor(name)
            if not tensor.numel() or all(bound.isfinite() for bound in tensor.aminmax()):  # 50 times as fast
                continue
            wrong = int((~tensor.isfinite()).sum())
            raise UsageError(f"{file} has {wrong} numbers that are not finite in {name}; copy or download it again")


def elements_of(models: Mapping[str, Path]) -> int:
    """Counts the elements of all tensors of several Hugging Face folders."""
    return sum(math.prod(shape) for folder in models.values() for shape in weight_shapes(folder).values())


def _twins(files: list[Path]) -> dict[str, str]:
    """Returns {output embedding: input embedding} if the files store both with equal values, otherwise an empty dict.

    Such a pair has to stay equal, because transformers does not tie two tensors that differ in the file.
    """
    where = {name: file for file in files for name in _names(file)}
    head = next((name for name in where if name.endswith(HEAD)), None)
    embedding = next((name for name in where if name.endswith(EMBEDDING)), None)
    if head is None or embedding is None:
        return {}
    equal = torch.equal(_tensor(where[head], head), _tensor(where[embedding], embedding))
    return {head: embedding} if equal else {}


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name)
    return tensor


def _has_more_digits(file: Path) -> bool:
    """Tells whether a file has tensors with more digits than bf16."""
    with safe_open(file, framework="pt") as tensors:
        return any(tensors.get_slice(name).get_dtype() != "BF16" for name in tensors.keys())  # noqa: SIM118


def _perturb(source: Path, target: Path, *, key: str, twins: dict[str, str], role: Role, rounded: bool) -> None:
    """Writes a copy with noise, none for ``key`` 0. rounded: to numbers that bf16 can represent; the dtype stays."""
    with safe_open(source, framework="pt") as tensors:
        metadata = tensors.metadata()
    changed = {}
    for name in (name for name in _names(source) if not (role.head == "value" and name.endswith(HEADS))):
        tensor = _tensor(source, name)
        tensor = tensor if key == "0" else noisy(tensor, role, key=f"{key} {twins.get(name, name)}")
        changed[name] = tensor.bfloat16().to(tensor.dtype) if rounded and tensor.is_floating_point() else tensor
    _write(changed, target, metadata=metadata)


def _write(tensors: dict[str, torch.Tensor], target: Path, *, metadata: dict[str, str] | None) -> None:
    """Writes a file, and replaces a link, because it may lead to the user's own weights.

    Not every version of safetensors writes a new file.
    """
    if target.is_symlink():
        target.unlink()
    save_file(tensors, target, metadata=metadata)


def noisy(tensor: torch.Tensor, role: Role, *, key: str) -> torch.Tensor:
    """Multiplies a tensor by 1 + the noise of a role, in its dtype."""
    if not tensor.is_floating_point():
        return tensor
    noise = 2 * torch.rand(tensor.shape, generator=generator_of(key), dtype=torch.float64) - 1
    return (tensor * (1 + role.noise * noise)).to(tensor.dtype)


def generator_of(key: str) -> torch.Generator:
    """Returns a random generator that is seeded by a text."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def model_sizes(model: Path) -> dict[str, int]:
    """Reads the numbers of heads, key-value heads, layers and experts from a Hugging Face folder, as arguments of
    Layout.validate. Raises UsageError if the configuration does not have them."""
    config = read_json(model / "config.json")
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    heads, layers, experts = (_first(config, keys) for keys in (_HEADS, _LAYERS, _EXPERTS))
    layers = layers or max(len(config.get(key) or ()) for key in _KINDS)
    for size, keys in ((heads, _HEADS), (layers, _LAYERS)):
        if not size:
            raise UsageError(f"{model}/config.json has none of {', '.join(keys)}; add one if this is a transformer")
    return {
        "heads": heads,
        "kv_heads": _first(config, _KV_HEADS) or (1 if config.get("multi_query") else heads),
        "layers": layers,
        "experts": experts,
    }


def _first(config: dict[str, Any], keys: Sequence[str]) -> int:
    """Returns the number under the first of the names that the configuration has; 0 if it has none.

    Raises UsageError for anything but a whole number.
    """
    key, value = next(((key, config[key]) for key in keys if config.get(key)), ("", 0))
    if type(value) is not int or value < 0:
        raise UsageError(f"config.json: {key} must be a positive whole number, got {shown(value)}")
    return value
