"""Uses transformers' own implementation as a second-class oracle, in a single process and one document at a time.

Each document is a batch of its own without padding, packing or a mask, so that transformers' handling of these cannot
cause an error. Weights are passed in as arguments: gradients, optimizer and masters stay the oracle's own.
"""

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch.func import functional_call
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from conformance.core.errors import UsageError, one_line, shown
from conformance.core.io import read_json
from conformance.models.folder_checks import (
    QUANTIZED_ADVICE,
    changes_training,
    code_remarks,
    known_keys,
    listed_ties,
    meaning_of,
    runs_code,
)
from conformance.models.folders import weight_files, weight_shapes
from conformance.oracle.decoder import is_buffer
from conformance.oracle.feed_forward import Routing
from conformance.oracle.primitives import HONEST, NO_TAP, Policy, Tap, Variant, Weights
from conformance.spec.batch import GRID, IMAGE, NO_COLUMNS, PIXEL, Columns, Document
from conformance.spec.observables import Head
from conformance.spec.scenario import LoraConfig

transformers.utils.logging.disable_progress_bar()  # it would be printed between the lines of a run

OF_ROUTER_LOGITS = {"aux_loss_coef", "router_aux_loss_coef"}  # without output_router_logits they do nothing
LINEAR, STATELESS = "linear_attention", ("mlp", "moe")  # among transformers' kinds of layers
SCORE = "score.weight"  # the head of a value model: a linear layer without bias on the last hidden state


class TransformersDecoder:
    """Implements conformance.oracle.role_model.Decoder.

    Raises UsageError for a model that transformers does not know as a causal language model, without position_ids, with
    linear attention that cannot be found, with dropout or with a router's auxiliary loss, and for a folder that needs
    its own Python code if it is not ``trusted``.
    """

    def __init__(
        self, folder: Path, *, disable_dropout: bool, trusted: bool, assume_inert: Collection[str] = ()
    ) -> None:
        self._folder = folder
        self._code = runs_code(folder, trusted=trusted)
        values = read_json(folder / "config.json")
        source = str(folder / "config.json")
        remarks = _check(values, source, disable_dropout=disable_dropout, assume_inert=assume_inert)
        self.not_judged = (*remarks, *code_remarks(folder))
        try:
            self._config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=self._code)
            self._class = self._causal_class()
            self._empty = self._built_empty()
        except UsageError:
            raise
        except Exception as error:  # transformers and code of folders raise errors of many types
            whose = "the Python code of the folder" if self._code else "transformers' own code"
            raise UsageError(
                f"{folder / 'config.json'} has model_type {shown(values.get('model_type'))}, which the oracle does not "
                f"know, and {whose} cannot build a causal language model of it with transformers "
                f"{transformers.__version__}: {type(error).__name__}: {one_line(error)}"
            ) from None
        self.untrained = frozenset(name for name, p in self._empty.named_parameters() if not p.requires_grad)
        if self.untrained:
            self.not_judged = (*self.not_judged, f"updates of {min(self.untrained)}, which the model's code freezes")
        taken = inspect.signature(self._class.forward).parameters
        # Code in a folder may accept position_ids as keyword arguments.
        if "position_ids" not in taken and not self._code:
            raise UsageError(
                f"{folder / 'config.json'} names {self._class.__name__}, which takes no position_ids, so documents in "
                f"one row cannot be separated; use another model"
            )
        text = self._config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.padding_token: int | None = getattr(text, "pad_token_id", None)
        kinds = tuple(getattr(text, "layer_types", None) or ())
        # transformers calls the layers of Mamba linear_attention; other convolutions have names of their own.
        recurrent = [kind for kind in kinds if kind not in STATELESS and (kind == LINEAR or "attention" not in kind)]
        if len(recurrent) > _convolutions(self._empty):
            raise UsageError(
                f"{folder / 'config.json'} names {self._class.__name__}, whose layers of kind "
                f"{', '.join(sorted({*recurrent}))} carry state from token to token and have no convolution by which "
                f"they could be found, so documents in one row cannot be separated; use another model"
            )
        slides = "sliding_attention" in kinds
        self.window: int | None = text.sliding_window if slides else None
        whose = "the folder's" if self._code else f"transformers {transformers.__version__}'s"
        self.second_class = f"{whose} own {self._class.__name__}"
        self._head: Head = "value" if _is_value_model(values) else "causal"
        self._models: dict[Policy, _Module] = {}

    @property
    def image_config(self) -> Any:
        return self._config if getattr(self._config, "vision_config", None) else None

    def _causal_class(self) -> type[transformers.PreTrainedModel]:
        reference = (getattr(self._config, "auto_map", None) or {}).get("AutoModelForCausalLM")
        if reference and self._code:
            return get_class_from_dynamic_module(reference, self._folder)  # type: ignore[no-any-return]
        kind = type(self._config)
        known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
        return known or transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]  # type: ignore[no-any-return]

    def _built_empty(self) -> transformers.PreTrainedModel:
        """Builds the model without weights, on torch's meta device. Errors of its code propagate.

        The code of a folder may be older than the installed transformers, so it is also called with two tokens.
        """
        with torch.device("meta"), listed_ties():
            model = self._class(self._config if self._code else self._text_config())
            if self._code:
                with contextlib.suppress(NotImplementedError, RuntimeError):  # routing needs numbers
                    model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        return model

    def _text_config(self) -> transformers.PretrainedConfig:
        """Returns the configuration that transformers' class takes, which may be the text part of a multimodal one."""
        text: transformers.PretrainedConfig = self._config.get_text_config()
        takes = self._class.config_class
        return text if isinstance(text, takes) and not isinstance(self._config, takes) else self._config

    def parameter_names(self, head: Head) -> tuple[str, ...]:
        names = tuple(name for name, _ in self._empty.named_parameters())
        if head == "causal":
            return names
        inside = f"{self._empty.base_model_prefix}."
        return (*(name for name in names if name.startswith(inside)), SCORE)

    def check_weights(self, folder: Path) -> None:
        weight_shapes(folder)
        try:
            self._loaded(folder, "meta", self._config.dtype or torch.float32)
        except UsageError:
            raise
        except Exception as error:  # transformers and code of folders raise errors of many types
            raise UsageError(
                f"transformers {transformers.__version__} cannot load the weights in {folder}: "
                f"{type(error).__name__}: {one_line(error)}"
            ) from None

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return ()

    def adapted(self, lora: LoraConfig) -> NoReturn:
        raise UsageError(
            f"the oracle supports adapters only for architectures that it computes itself, not for "
            f"{self._class.__name__}; leave lora out, or use a model of docs/guides/adding-a-model.md"
        )

    def merged(self, weights: Weights) -> NoReturn:
        raise AssertionError("a second-class oracle has no adapters")

    def varied(self, variant: Variant) -> "TransformersDecoder":
        return self

    def load(
        self, folder: Path, dtype: torch.dtype, variant: Variant, *, trained: bool, devices: Sequence[str]
    ) -> Weights:
        weights = _Module(self._loaded(folder, devices[0], dtype), self._prefix).weights
        if self._head == "value":
            weights[SCORE] = _tensor(folder, SCORE).to(devices[0], dtype)
        return variant.loaded(weights, None, trained=trained)

    router_loss = 0.0
    routers = ()

    def routing(self, documents: Sequence[Document], key: str) -> None:
        return None

    def forward(
        self,
        tokens: Tensor,
        weights: Weights,
        policy: Policy,
        variant: Variant = HONEST,
        tap: Tap = NO_TAP,
        routing: Routing | None = None,
        lengths: Sequence[int] = (),
        columns: Columns = NO_COLUMNS,
    ) -> Tensor:
        assert not lengths, "only models that are written from the papers take several documents"
        images = _images(columns, self._config, policy.stable) if IMAGE in columns else {}
        w = {name: tensor.to(policy.compute) for name, tensor in weights.items()}
        output = self._module(policy, str(tokens.device))(tokens, w, images)
        found: Tensor = output.last_hidden_state @ w[SCORE].T if self._head == "value" else output.logits
        return found[0]

    def described(self) -> dict[str, Any]:
        return {"second_class": self.second_class, "head": self._head}

    @property
    def _prefix(self) -> str:
        """Returns the prefix of parameter names: for a value model, the module is the language model without head."""
        return f"{self._class.base_model_prefix}." if self._head == "value" else ""

    def _module(self, policy: Policy, device: str) -> "_Module":
        """Returns the model without weights. Its buffers are those of a model that is loaded in the master dtype."""
        if policy not in self._models:
            model = self._loaded(self._folder, device, policy.stable, fused=policy.fused)
            self._models[policy] = _Module(model, self._prefix).without_weights()
        return self._models[policy]

    def _loaded(
        self, folder: Path, device: str, dtype: torch.dtype, *, fused: bool = False
    ) -> transformers.PreTrainedModel:
        """Loads the model with the weights of ``folder``, in evaluation mode. Raises UsageError if they do not fit."""
        value = self._head == "value"
        causal = self._code or type(self._config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        language = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText
        loader = transformers.AutoModel if value else language
        with warnings.catch_warnings(), listed_ties():
            warnings.simplefilter("ignore")
            model, found = loader.from_pretrained(
                folder,
                trust_remote_code=self._code,
                dtype=dtype,
                attn_implementation="sdpa" if fused and self._class._supports_sdpa else "eager",
                # transformers' default is a kernel for groups of experts, which does not support float64.
                **({} if fused else {"experts_implementation": "eager"}),
                device_map={"": device},
                output_loading_info=True,
                local_files_only=True,
            )
        found["unexpected_keys"] = set(found["unexpected_keys"]) - ({SCORE} if value else set())
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, found[kind])):
                raise UsageError(
                    f"the weights in {folder} do not fit its config.json: {kind.replace('_', ' ')} {names[:8]}"
                )
        model.config.use_cache = False
        return model.eval()


class _Module:
    """Calls a model with weights that are passed in by their names in the causal language model."""

    def __init__(self, model: transformers.PreTrainedModel, prefix: str) -> None:
        self._model, self._prefix = model, prefix
        first: dict[int, str] = {}
        # A tied tensor is known by its first name; all its names are replaced in a call.
        self._names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    @property
    def weights(self) -> Weights:
        """Returns parameters and the saved buffers, which are used as loaded."""
        buffers = ((name, buffer) for name, buffer in self._model.named_buffers() if is_buffer(name))
        found = itertools.chain(self._model.named_parameters(), buffers)
        return {self._prefix + name: tensor.detach() for name, tensor in found}

    def without_weights(self) -> "_Module":
        """Empties the parameters, so that the weights are in memory only once."""
        for module in self._model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=False))
        return self

    def __call__(self, tokens: Tensor, weights: Mapping[str, Tensor], images: Mapping[str, Tensor]) -> Any:
        given = {name: weights[self._prefix + first] for name, first in self._names.items()}
        inputs = {"input_ids": tokens[None], "use_cache": False, **images}
        return functional_call(self._model, given, args=(), kwargs=inputs, tie_weights=False)


def _check(
    values: Mapping[str, Any], source: str, *, disable_dropout: bool, assume_inert: Collection[str]
) -> tuple[str, ...]:
    """Returns what the file says about the training that is not judged, because transformers does not compute it.

    Raises UsageError for quantized weights, for options that make training random, and for a router's auxiliary loss,
    which no objective includes.
    """
    if values.get("output_router_logits"):
        raise UsageError(
            f"{source} sets output_router_logits=true, but no objective includes a router's auxiliary loss: set it to "
            f"false"
        )
    known = known_keys(values.get("model_type"))
    remarks = []
    for part in (values, *(value for value in values.values() if isinstance(value, dict))):
        for key in sorted(part.keys() - OF_ROUTER_LOGITS):
            entry = f"{key[:60]}={shown(part[key])}"
            meaning = changes_training(key, part[key])
            if meaning is None and part is values and known and key not in known:
                meaning = meaning_of(key, values, read=known)
            kind = "inert" if meaning is None else meaning.kind
            if kind == "quantized":
                raise UsageError(f"{source} sets {entry}: {QUANTIZED_ADVICE}")
            if kind == "random" and not disable_dropout:
                raise UsageError(f"{source} sets {entry}, which makes two runs differ at random: set {key[:60]} to 0.0")
            if kind == "not judged":
                assert meaning is not None
                remarks.append(f"{entry} ({meaning.why})")
            if kind in ("unknown", "contradicts"):
                why = (
                    "assumed to be inert by --assume-inert" if key in assume_inert else "transformers does not read it"
                )
                remarks.append(f"{entry} ({why})")
    return tuple(remarks)


def _images(columns: Columns, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the images of a document as transformers' processors give them. The model finds positions by itself."""
    tower = config.vision_config
    table = {name: torch.tensor(column, dtype=dtype) for name, column in columns.items()}
    marks = table[IMAGE].bool()
    numbers = torch.stack([table[name] for name in columns if name.startswith(PIXEL)], dim=1)[marks]
    if merge := getattr(tower, "spatial_merge_size", None):
        grids = torch.stack([table[name] for name in GRID], dim=1).long()
        pixels = numbers.reshape(len(numbers) * merge**2, -1)
        return {
            "pixel_values": pixels,
            "image_grid_thw": grids[grids[:, 0] > 0],
            "mm_token_type_ids": marks.long()[None],
        }
    size = (tower.num_channels, tower.image_size, tower.image_size)
    return {"pixel_values": numbers.reshape(-1, *size), "token_type_ids": marks.long()[None]}


def _convolutions(model: torch.nn.Module) -> int:
    """Counts the modules that own a convolution over the tokens, as recurrent layers of transformers do."""
    return sum(any(isinstance(child, torch.nn.Conv1d) for child in m.children()) for m in model.modules())


def _is_value_model(values: Mapping[str, Any]) -> bool:
    """Tells whether the folder is a value model: sequence classification with one label, read at every token."""
    names = values.get("architectures") or ()
    return any(str(name).endswith("ForSequenceClassification") for name in names)


@functools.cache
def _tensor(folder: Path, name: str) -> Tensor:
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118
                return tensors.get_tensor(name)  # type: ignore[no-any-return]
    raise UsageError(f"{folder} is a value model without {name}; download the folder again")
