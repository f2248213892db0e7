"""Checks the content of a user's model folder, and decides whether its Python code may run.

An unusable folder is reported in one line, before anything is copied, loaded or run. Every call of transformers with a
folder gets its ``trust_remote_code`` from ``runs_code``.

A key of a ``config.json`` that the reference does not read is judged by its meaning. It is inert if its value switches
a feature off, repeats another key or equals the default of transformers' class. A key that changes the training, such
as multi-token prediction, is named in the verdict as not judged. Quantized weights, dropout and keys of unknown meaning
are refused.
"""

import contextlib
import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from conformance.core.errors import UsageError, shown
from conformance.core.host import FIXTURES
from conformance.core.io import check_file, is_file, read_json
from conformance.spec.scenario import ADAPTER

Files = tuple[tuple[Path, int], ...]
CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
NOT_COPIED = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "__pycache__", ".*", ADAPTER)
# folder_code() of the bundled openPangu model. A copy with other Python code or another auto_map has another digest.
BUNDLED_CODE = "57290f782b6e10d3da0f048d0ba6c6f8c43f72f7a6af07160c95951649608e54"


def check_model_folder(model: Path) -> None:
    """Raises UsageError if ``model`` is not a Hugging Face model folder, or contains something that cannot be copied.

    Symbolic links may only lead to files of the folder, or of the same repository in Hugging Face's cache. Otherwise
    other files of this machine could get into the output.
    """
    if not (model / CONFIG).exists():
        raise UsageError(f"{model} is not a Hugging Face model folder: it has no {CONFIG}")
    roots = [model.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    if roots[0].parent == FIXTURES / "models":
        roots.append(roots[0].parent)  # one tokenizer file serves all models
    for file in _files(model):
        if file.is_symlink():
            _check_link(file, roots)
        try:
            check_file(file)
        except FileNotFoundError:
            raise UsageError(f"{file} is a broken link; remove it, or download the folder again") from None


def files_of(model: Path) -> Files:
    """Returns the files of a model folder with their modification times, as a key for caches."""
    return tuple((file, file.stat().st_mtime_ns) for file in sorted(_files(model)) if file.exists())


def _files(model: Path) -> Iterator[Path]:
    """Yields all files and symbolic links of the folder that are copied or linked."""
    left_out = [pattern for pattern in NOT_COPIED if pattern != "*.safetensors"]
    for folder, folders, files in os.walk(model):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        folders[:] = [name for name in folders if not _matches(name, left_out) and name not in links]
        for name in (*files, *links):
            if not _matches(name, left_out):
                yield Path(folder) / name


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _check_link(link: Path, roots: list[Path]) -> None:
    target = Path(os.path.realpath(link))
    if not any(target.is_relative_to(root) for root in roots):
        raise UsageError(f"{link} is a link that leaves the folder, to {target}; put a copy in its place")
    if target.is_dir():
        raise UsageError(f"{link} is a link to a folder; put a copy in its place")


def runs_code(folder: Path, *, trusted: bool, tokenizer: bool = False) -> bool:
    """Returns ``trust_remote_code`` for transformers: whether its model, or ``tokenizer``, runs code of the folder.

    ``trusted``: the user has allowed it. A model never runs code if transformers has a class of its own for it. Raises
    UsageError if the folder has code that would run and that the user has not allowed, and if it lacks such code.
    """
    references = _references(folder)
    if replaced_code(folder):
        del references[CONFIG]
    for file, named in references.items():
        _check_code_files(folder, file, named)
    if references and not (trusted or folder_code(folder) == BUNDLED_CODE):
        raise UsageError(
            f"{folder / next(iter(references))} names Python code of the folder (auto_map), and loading the model "
            f"would run it; read the code, and add --trust-remote-code if you trust it"
        )
    return bool(references) if tokenizer else CONFIG in references


def _check_code_files(folder: Path, file: str, references: object) -> None:
    """Raises UsageError if an ``auto_map`` names a module that the folder lacks, apart from other repositories."""
    values = references.values() if isinstance(references, dict) else [references]
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    for name in (name for name in names if isinstance(name, str) and "--" not in name):
        module = f"{name.split('.')[0]}.py"
        if not is_file(folder / module):
            raise UsageError(
                f"{folder} lacks {shown(module)}, which {file} names in auto_map; download it into the folder"
            )


def replaced_code(folder: Path) -> str:
    """Names the model type whose code in the folder transformers' own class replaces; empty if the folder has none."""
    if CONFIG not in _references(folder):
        return ""
    kind = read_json(folder / CONFIG).get("model_type")
    if not isinstance(kind, str) or not _is_named_by_transformers(kind):
        return ""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # takes seconds
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return kind if kind in CONFIG_MAPPING_NAMES and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else ""


@cache
def _is_named_by_transformers(kind: str) -> bool:
    """Returns whether the files with transformers' tables of model types, which are not imported, name ``kind``."""
    found = find_spec("transformers")
    files = Path(found.origin).parent.glob("models/auto/*.py") if found and found.origin else ()
    return any(f'"{kind}"' in file.read_text(encoding="utf-8") for file in files)


def code_remarks(folder: Path) -> tuple[str, ...]:
    """Remarks for a verdict that the folder's model code was not run, if transformers' own class replaced it."""
    kind = replaced_code(folder)
    return (f"the folder's Python code (auto_map): transformers' own class of {kind} took its place",) if kind else ()


def folder_code(folder: Path) -> str:
    """Returns a hexadecimal SHA-256 of a folder's Python files and the ``auto_map`` of its configuration files."""
    digests = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*.py"))
        if file.is_file()
    }
    return hashlib.sha256(json.dumps([digests, _references(folder)], sort_keys=True).encode()).hexdigest()


def _references(folder: Path) -> dict[str, object]:
    """Returns the ``auto_map`` of each configuration file that has one, by the file's name."""
    files = [name for name in (CONFIG, TOKENIZER_CONFIG) if (folder / name).exists()]
    found = {name: read_json(folder / name).get("auto_map") for name in files}
    return {name: references for name, references in found.items() if references}


@contextlib.contextmanager
def listed_ties() -> Iterator[None]:
    """Lets transformers 5 tie weights that a folder's code lists (``_tied_weights_keys``), as transformers 4 did.

    Published code, such as openPangu's, lists the weights that are tied to the input embedding. transformers 5 needs a
    dictionary.
    """
    from transformers import PreTrainedModel  # takes a while to import

    expand = PreTrainedModel.get_expanded_tied_weights_keys

    def expanded(model: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(listed := model._tied_weights_keys, list | tuple | set):
            embedding = model.get_input_embeddings()
            source = next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)
            model._tied_weights_keys = {name: source for name in listed if name.endswith("weight") and name != source}
        return expand(model, *arguments, **options)

    with mock.patch.object(PreTrainedModel, "get_expanded_tied_weights_keys", expanded):
        yield


# Keys that describe a folder, its tokenizer, kernels, or how ranks share the work, and values that weights replace.
INERT = re.compile(
    r"_?name_or_path|architectures|auto_map|model_type|(torch_)?dtype|.*_?version|tokenizer_class|model_name|ep_size|"
    r"(model_)?max_position_embeddings|model_max_length|max_sequence_length|seq_length|.*_token_ids?|id2label|label2id|"
    r".*attn_impl(ementation)?.*|.*flash_att.*|use_sdpa|use_cache|(.*_)?initializer(_.*)?|(.*_)?init(_.*)?|unsloth_.*|transformers\..*"
)
RANDOM = re.compile(r"dropout|pdrop|layer_?drop|drop_(path|rate|prob)|_drop$|jitter")
OF_CLASSIFIERS = re.compile(r"(classifier|summary)_")  # starts of names that only classification heads read
QUANTIZED = re.compile(r"^_?quantiz(e|ed|ation)(_config)?$|^quant_(config|method)$|^compression_config$")
QUANTIZED_ADVICE = (
    "quantized weights cannot be trained; convert them to bfloat16 (with dequantize=True of transformers' "
    "FineGrainedFP8Config or Mxfp4Config, for example), save the model, and remove the key"
)
# Features of trainings that neither the oracle nor transformers computes. Verdicts mention them.
NOT_JUDGED = {
    "multi-token prediction": re.compile(r"nextn|multi_token|(^|_)mtp(_|$)"),
    "balancing of experts": re.compile(r"aux_(loss|free)|seq_aux|balanc|bias_update|z_loss|capacity"),
}
# Features of every decoder that the oracle computes: true says so, false contradicts it.
COMPUTED = re.compile(
    r"(use_|apply_|is_|has_)?(rope|rotary(_pos)?(_emb(eddings?)?)?|causal(_(mask|attention))?|decoder|gated(_mlp)?|glu)|"
    r"scale_attn(_weights)?"
)
# 0 switches off a number of parts. It does not switch off a factor, for which 1 is neutral, or a size.
FACTORS = re.compile(r"scal|multiplier|factor|ratio|percent|pct|temperature|theta|base|eps|alpha|size|dim|window")
# Factors for which 1 is neutral. A factor of attention scores is not among them: it replaces 1 / sqrt(head_dim).
NEUTRAL_AT_1 = re.compile(
    r"(embedding|residual|logits?|lm_head|interpolat\w*|mup|width|rope)s?_(multiplier|scal\w*|factor)"
)
PARTS = {"decoder", "generator", "text_config", "text_encoder"}  # transformers takes the model's configuration there
ALIASES = (
    {"hidden_act", "hidden_activation", "activation_function"},
    {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"},
    {"num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "moe_topk"},
    {"num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num"},
    {"num_hidden_layers", "num_layers", "n_layers", "n_layer"},
    {"num_attention_heads", "n_heads", "n_head"},
    {"hidden_size", "n_embd", "d_model"},
    {"intermediate_size", "ffn_hidden_size"},
    {"head_dim", "kv_channels", "attention_head_dim"},
    {"rms_norm_eps", "norm_eps", "layer_norm_eps", "layernorm_epsilon"},
)

Kind = Literal["inert", "not judged", "random", "quantized", "contradicts", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Holds what a key does. why: for verdicts and messages, without the key and its value."""

    kind: Kind
    why: str = ""


_INERT = Meaning(kind="inert")


def meaning_of(key: str, values: Mapping[str, Any], *, read: Collection[str]) -> Meaning:
    """Returns what a ``key`` of the configuration ``values`` does that the reference does not read.

    ``read``: the keys that it reads.
    """
    value = values[key]
    if key in PARTS and value is not None:
        return Meaning(kind="unknown", why="transformers takes it for the configuration of a part of the model")
    if found := changes_training(key, value):
        return found
    if INERT.fullmatch(key) or (COMPUTED.fullmatch(key) and value is True) or key in _of_generation():
        return _INERT
    kind = values.get("model_type")
    for other in sorted(_aliases(key, kind)):
        if other in read and values.get(other) is not None and value is not None:
            if values[other] == value:
                return _INERT
            return Meaning(kind="contradicts", why=f"it is another name of {other}, which is {shown(values[other])}")
    if NEUTRAL_AT_1.fullmatch(key) and type(value) in (int, float) and value == 1:
        return _INERT
    declared = declared_by_class(kind)
    if value is None or (key in declared and value == declared[key]):
        return _INERT
    off = is_off(value) and not COMPUTED.fullmatch(key) and not (_is_zero(value) and FACTORS.search(key))
    if off and is_off(declared.get(key)):
        return _INERT
    return Meaning(kind="unknown", why=f"transformers' default is {shown(declared[key])}" if key in declared else "")


def changes_training(key: str, value: Any) -> Meaning | None:
    """Returns what a key does to a training, by its name; None if the name says nothing."""
    feature = next((name for name, pattern in NOT_JUDGED.items() if pattern.search(key)), "")
    is_random = RANDOM.search(key) and not OF_CLASSIFIERS.match(key)
    quantized = QUANTIZED.search(key)
    if not (feature or is_random or quantized):
        return None
    if is_off(value):
        return _INERT
    if quantized:
        return Meaning(kind="quantized")
    return Meaning(kind="random") if is_random else Meaning(kind="not judged", why=feature)


def is_off(value: Any) -> bool:
    """Tells whether a value switches a feature off: null, false, 0, or empty at all depths."""
    if isinstance(value, Mapping):
        return all(map(is_off, value.values()))
    return value is None or value is False or value == "" or value == [] or _is_zero(value)


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


# transformers is imported only for a key that is read nowhere, because the import takes seconds.


def _aliases(key: str, model_type: object) -> set[str]:
    """Returns the other names of a key: those of transformers' class of the model, and those of ALIASES."""
    of_class = map(set, getattr(config_class(model_type), "attribute_map", {}).items())
    return {name for group in (*ALIASES, *of_class) if key in group for name in group} - {key}


@cache
def declared_by_class(model_type: object) -> Mapping[str, Any]:
    """Returns the defaults of transformers' configuration class for ``model_type``, or of its base class.

    ``is_decoder`` is added, which files of older transformers have.
    """
    from transformers import PretrainedConfig

    found = config_class(model_type) or PretrainedConfig
    with contextlib.suppress(Exception):  # a few classes refuse their own defaults
        return {"is_decoder": False, **found().to_dict()}
    return {}


def known_keys(model_type: object) -> Collection[str]:
    """Returns the keys that transformers' configuration class for ``model_type`` knows; empty without a class."""
    found = config_class(model_type)
    return () if found is None else {*declared_by_class(model_type), *found.attribute_map, "rope_theta", "rope_scaling"}


@cache
def _of_generation() -> Collection[str]:
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict())


def config_class(model_type: object) -> Any:
    """Returns transformers' configuration class for ``model_type``; None if it has none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None
