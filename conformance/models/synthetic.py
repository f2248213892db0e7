"""Makes model folders whose weights are drawn at random, and copies of folders with other numbers.

A phase that resumes from a checkpoint begins with a copy with other numbers. So what is not restored shows, also for
frozen weights: with the folder of the previous phase, they would be right whatever was saved.

Random models serve runs at a size for which weights cannot be stored. Their folder has a configuration and RECIPE, with
two lines::

    seed = 0
    like = "pangu"  # a folder next to it, which provides tokenizer, rollouts and Python code

When cells are planned, a skeleton replaces it: a model folder in the cache with everything except weights. These are
drawn when ranks need them, in the dtype that the configuration names, tensor by tensor, from the seed and the tensor's
name alone. No weight is neutral: biases are not 0, weights of norms are not 1. Tokens of the small tokenizer are spread
over the vocabulary, so that every shard of it is reached. ``deviation`` is the standard deviation of matrices and
biases, 0.02 by default.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from safetensors.torch import load_file, save_file
from torch import Tensor

from conformance.core.errors import STRICT, UsageError, explain, one_line, shown
from conformance.core.host import cache_folder, resolve
from conformance.core.io import complete_or_nothing, locked, read_json, read_toml
from conformance.models.components import Architecture, parameter_shapes
from conformance.models.families import is_written, read_architecture
from conformance.models.folder_checks import CONFIG, NOT_COPIED, Files, check_model_folder, files_of, runs_code
from conformance.models.folders import (
    HEADS,
    INDEX,
    VALUE_FILE,
    VALUE_HEAD,
    generator_of,
    has_weights,
    is_base_of,
    key_of,
    noisy,
    value_head,
    weight_shapes,
    write_adapter,
)
from conformance.numerics.sketch import LARGE_MODELS, sketched_above
from conformance.spec.observables import POLICY, Role
from conformance.spec.scenario import ADAPTER, Count, Scenario


def with_other_numbers(folder: Path, out: Path) -> Path:
    """Copies a Hugging Face folder with its adapter to ``out``, with the same shapes and dtypes and other numbers."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in folder.rglob("*.safetensors"):
        save_file({name: _other(tensor) for name, tensor in load_file(file).items()}, out / file.relative_to(folder))
    return out


def _other(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 0.5 + 0.25 if tensor.is_floating_point() else tensor


RECIPE, TOKENIZER = "random_weights.toml", "tokenizer.json"
ELEMENTS_PER_FILE = 2**30  # at most, unless one tensor has more
NORM = 0.1  # standard deviation of the weights of norms around their neutral value
KEPT_TOKENS = 8  # special tokens at the beginning of the small vocabulary, which keep their numbers


@validated(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """Says how the weights of a folder are drawn; see the module's docstring.

    ``tokens``: size of the small vocabulary, in a skeleton only.
    """

    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)]
    like: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    deviation: Annotated[float, Field(gt=0, le=1)] = 0.02
    tokens: Count | None = None


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """Describes a model with drawn weights. ``tokens``: the size of the small model's vocabulary."""

    recipe: Recipe
    tokens: int
    architecture: Architecture
    dtype: torch.dtype

    def spread(self, token: int) -> int:
        """Maps a token of the small model to a token of the large vocabulary."""
        if token < KEPT_TOKENS:
            return token
        free, steps = self.architecture.vocab_size - KEPT_TOKENS, self.tokens - KEPT_TOKENS
        return KEPT_TOKENS + (token - KEPT_TOKENS) * free // steps

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights that will be drawn, by name."""
        return parameter_shapes(self.architecture)


def with_skeleton(model: str) -> str:
    """Returns the path of a model folder; for a folder with a recipe, that of its skeleton, which is made if needed.

    Raises UsageError for a recipe that cannot be used.
    """
    folder = resolve(model)
    recipe = _recipe(folder)
    if recipe is None or recipe.tokens:
        return model
    file, like = folder / RECIPE, folder.parent / recipe.like
    check_model_folder(folder)
    check_model_folder(like)
    if not is_written(folder):
        raise UsageError(f"{file}: only models that the oracle computes from the papers can have random weights")
    tokens = int(read_json(like / CONFIG).get("vocab_size", 0))
    if not KEPT_TOKENS < tokens <= read_architecture(folder).vocab_size:
        raise UsageError(f"{file}: the vocabulary of {like} has {tokens} tokens; it must be the smaller one")
    if not (like / TOKENIZER).is_file():
        raise UsageError(f"{file}: {like} has no {TOKENIZER} whose tokens could be spread; name another folder")
    made = _random_model(folder, dataclasses.replace(recipe, tokens=tokens))
    skeleton = cache_folder() / "skeletons" / _digest(folder, like) / folder.name
    try:
        with locked(skeleton.with_name(f"{skeleton.name}.lock")):
            if not skeleton.exists():
                with complete_or_nothing(skeleton) as unfinished:
                    _write_skeleton(made, folder, like, unfinished)
    except OSError as error:
        raise UsageError(f"{skeleton} cannot be made ({error}); set PARITY_CACHE to another folder") from None
    return str(skeleton)


def random_model(folder: Path) -> RandomModel | None:
    """Returns the random model of a skeleton; None for any other folder."""
    recipe = _recipe(folder)
    return None if recipe is None or not recipe.tokens else _random_model(folder, recipe)


def _random_model(folder: Path, recipe: Recipe) -> RandomModel:
    config = read_json(folder / CONFIG)
    dtype = config.get("dtype", config.get("torch_dtype", "bfloat16"))
    if dtype not in ("bfloat16", "float32"):
        raise UsageError(f"{folder / CONFIG} sets dtype={shown(dtype)}; weights are drawn in bfloat16 or float32")
    assert recipe.tokens, "only skeletons have weights"
    drawn = torch.float32 if dtype == "float32" else torch.bfloat16
    return RandomModel(recipe=recipe, tokens=recipe.tokens, architecture=read_architecture(folder), dtype=drawn)


def _recipe(folder: Path) -> Recipe | None:
    file = folder / RECIPE
    if not file.is_file():
        return None
    try:
        return TypeAdapter(Recipe).validate_python(read_toml(file))
    except ValidationError as error:
        raise explain(error, source=str(file), what="recipe") from None


def _digest(*folders: Path) -> str:
    """Digests everything in the folders except weights."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if file.is_file() and file.suffix != ".safetensors":
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:10]


def _write_skeleton(model: RandomModel, folder: Path, like: Path, out: Path) -> None:
    shutil.copytree(like, out, ignore=shutil.ignore_patterns(*NOT_COPIED, CONFIG))
    shutil.copy(folder / CONFIG, out / CONFIG)
    lines = [f"{key} = {json.dumps(value)}" for key, value in dataclasses.asdict(model.recipe).items()]
    (out / RECIPE).write_text("\n".join((*lines, "")), encoding="utf-8")
    tokenizer = read_json(out / TOKENIZER)
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {text: model.spread(token) for text, token in vocabulary.items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = model.spread(added["id"])
    (out / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def is_without_weights(folder: Path) -> bool:
    """Tells whether a model folder has neither weights nor a recipe for them, which suffices to plan a run."""
    return not (has_weights(folder) or random_model(folder))


def shapes_of(folder: Path, *, trusted: bool = False) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a model folder, also of weights not yet drawn. Raises UsageError.

    Without weights they are those of the configuration. ``trusted``: Python code of the folder may run for this.
    """
    if drawn := random_model(folder):
        return drawn.shapes()
    if has_weights(folder):
        return weight_shapes(folder)
    if is_written(folder):
        return parameter_shapes(read_architecture(folder, disable_dropout=True))
    return _shapes_of_transformers(folder, files_of(folder), code=runs_code(folder, trusted=trusted))


@lru_cache(maxsize=8)
def _shapes_of_transformers(folder: Path, files: Files, *, code: bool) -> Mapping[str, tuple[int, ...]]:
    """Builds a model without numbers, by its configuration alone; ``files`` are only part of the cache's key."""
    import transformers  # takes seconds

    from conformance.models.folder_checks import listed_ties

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=code)
        with torch.device("meta"), listed_ties():
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=code)
    except Exception as error:  # transformers raises errors of many types for unexpected values
        raise UsageError(f"transformers cannot build a model of {folder / CONFIG}: {one_line(error)}") from None
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@cache
def elements(scenario: Scenario) -> int:
    """Counts the elements of all models of a scenario."""
    each = sum(
        math.prod(shape) for shape in shapes_of(resolve(scenario.model), trusted=scenario.trust_remote_code).values()
    )
    return each * len(scenario.objective.roles)


def is_large(scenario: Scenario) -> bool:
    """Tells whether the models are so large that two things of their size should not be made at the same time."""
    return elements(scenario) > LARGE_MODELS


def is_sketched(scenario: Scenario) -> bool:
    """Tells whether records keep sketches of some matrices (conformance.numerics.sketch)."""
    return sketched_above(scenario.sketch, elements(scenario)) < elements(scenario)


def draw_weights(model: RandomModel, scenario: Scenario, role: Role, out: Path) -> None:
    """Draws the weights of one role into its folder ``out``, unless they exist, and the adapter of a policy with LoRA.

    They are perturbed by seed and role as those of any model are (conformance.models.folders).
    """
    if (out / INDEX).exists():
        return
    key = key_of(scenario, role)
    if scenario.lora and role == POLICY:
        shutil.rmtree(out / ADAPTER, ignore_errors=True)  # left by an interrupted run
        write_adapter(out / ADAPTER, scenario.lora, model.shapes(), key=key)
    where: dict[str, str] = {}
    is_value = role.head == "value"
    is_rounded = is_base_of(scenario, role) or scenario.tier.stored is not None
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for number, all_ in enumerate(_files(model), start=1):
            names = [name for name in all_ if not (is_value and name in HEADS)]
            file = f"model-{number:05d}.safetensors"
            drawn = partial(_drawn, model, role, "" if key == "0" else key, rounded=is_rounded)
            tensors = threads.map(drawn, names)
            save_file(dict(zip(names, tensors, strict=True)), out / file, metadata={"format": "pt"})
            where |= dict.fromkeys(names, file)
    if is_value:
        save_file({VALUE_HEAD: value_head(out, key=key)}, out / VALUE_FILE, metadata={"format": "pt"})
        where[VALUE_HEAD] = VALUE_FILE
    unfinished = out / f"{INDEX}.unfinished"
    size = model.dtype.itemsize * sum(map(math.prod, model.shapes().values()))
    unfinished.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}), encoding="utf-8")
    unfinished.rename(out / INDEX)


def _files(model: RandomModel) -> Iterator[list[str]]:
    """Yields the names of the tensors of each file."""
    count, names = 0, list[str]()
    for name, shape in model.shapes().items():
        size = torch.Size(shape).numel()
        if names and count + size > ELEMENTS_PER_FILE:
            yield names
            count, names = 0, []
        count, names = count + size, [*names, name]
    yield names


def _drawn(model: RandomModel, role: Role, key: str, name: str, *, rounded: bool) -> Tensor:
    """Draws a tensor. rounded: to numbers that bf16 can represent; the dtype stays."""
    shape = model.shapes()[name]
    numbers = torch.randn(shape, generator=generator_of(f"{model.recipe.seed} random {name}"))
    if name.endswith("norm.weight"):
        plus_one = model.architecture.norm.plus_one and not name.endswith("linear_attn.norm.weight")
        numbers = numbers * NORM + (0.0 if plus_one else 1.0)
    else:
        numbers = numbers * model.recipe.deviation
    drawn = numbers.to(model.dtype)
    drawn = noisy(drawn, role, key=f"{key} {name}") if key else drawn
    return drawn.bfloat16().to(drawn.dtype) if rounded else drawn
