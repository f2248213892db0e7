"""Builds the model of a Hugging Face folder the way trainers do: by AutoConfig, ``auto_map`` and the declared
architecture; with its weights, or without, for ranks that read only their own."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_outputs import CausalLMOutput

from conformance.inputs.folder import runs_code
from conformance.inputs.model import weight_files
from conformance.role import Head
from conformance.validation import UsageError
from impl.buffers import published_buffers
from impl.document_masks import keep_documents_apart
from impl.families import beyond_kernels, needs_loop
from impl.files import fill
from impl.published_code import fill_rotary_tables, older_names
from impl.unread import UnreadWeights, give_memory, reading_headers, take_origins


def empty_model(
    path: Path, *, dtype: torch.dtype, attention: str | None, head: Head = "causal", trusted: bool = False
) -> transformers.PreTrainedModel:
    """Build the model in ``dtype``, in training mode, with buffers and without the numbers of its parameters.

    These lie on the meta device; the model's attribute ``unread`` (impl.unread.UnreadWeights) says where they are.

    With the head ``causal``, it is a causal language model if the folder declares one, else image-text-to-text, else
    the bare AutoModel; with the head ``value``, see ``value_class``. ``attention``: transformers' name of the attention
    implementation; None is torch's kernel where the model can have it, and plain products elsewhere. ``trusted``: the
    folder's Python code may be run. Raises UsageError if that code has to be run and is not trusted, and if the
    folder's weights are not exactly the model's.
    """
    code, config = runs_code(path, trusted=trusted), read_config(path, trusted=trusted)
    with older_names(path, runs_code=code) as are_needed, reading_headers():
        loader = value_class(causal_class(config, path)) if head == "value" else _auto_class(config)
        model, found = loader.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention or _own_attention(path, config, dtype),
            output_loading_info=True,
            # transformers' default is a kernel for groups of experts, which knows no float64.
            **({"experts_implementation": "eager"} if dtype == torch.float64 or needs_loop(path) else {}),
            **({} if head == "value" else {"trust_remote_code": code}),
        )
        if are_needed:
            fill_rotary_tables(model)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, found[kind])):
            raise UsageError(
                f"the weights in {path} do not fit {type(model).__name__}: {kind.replace('_', ' ')} {names[:8]}; a "
                f"parameter must never be left at random, so give the complete folder of this model"
            )
    model.unread = take_origins(model, weight_files(path))
    model.config.use_cache = False
    keep_documents_apart(model)
    for buffer in published_buffers(model).values():
        buffer.data = buffer.data.to(torch.promote_types(buffer.dtype, dtype))  # some stay float32 in a float64 model
    return model.train()


def load_model(
    path: Path, *, dtype: torch.dtype, attention: str | None, head: Head = "causal", trusted: bool = False
) -> transformers.PreTrainedModel:
    """As ``empty_model``, with all of its numbers, in the memory of the host."""
    model = empty_model(path, dtype=dtype, attention=attention, head=head, trusted=trusted)
    unread: UnreadWeights = model.unread
    give_memory(model, lambda empty: torch.empty_like(empty, device="cpu"))
    with unread.opened("cpu") as read, torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter, name, [0] * parameter.dim(), read.region)
    del model.unread
    return model


def value_class(causal: type[transformers.PreTrainedModel]) -> type[transformers.PreTrainedModel]:
    """The class of a value model: the layers of the language model ``causal`` with one number per token as the output.

    The head ``score`` is a linear layer without bias, and ``logits`` of the output are (rows, length, 1). The parameter
    names are those of transformers' sequence classification with one label, and of OpenRLHF's critic.
    """

    class ValueModel(causal):  # type: ignore[misc]
        _tied_weights_keys = None
        _tp_plan: dict[str, str] = {}  # noqa: RUF012 (transformers has it so)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            head = super().get_output_embeddings()
            delattr(self, next(name for name, module in self.named_children() if module is head))
            self.score = torch.nn.Linear(config.get_text_config().hidden_size, 1, bias=False)

        def get_output_embeddings(self) -> None:
            return None

        def forward(self, **inputs: Any) -> CausalLMOutput:
            hidden = getattr(self, self.base_model_prefix)(**inputs).last_hidden_state
            return CausalLMOutput(logits=self.score(hidden))

    ValueModel.__name__ = ValueModel.__qualname__ = causal.__name__.replace("ForCausalLM", "ForTokenValues")
    return ValueModel


def read_config(path: Path, *, trusted: bool = False) -> transformers.PretrainedConfig:
    """The configuration in a Hugging Face folder. Raises UsageError for untrusted code, as ``load_model``."""
    code = runs_code(path, trusted=trusted)
    config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(path, trust_remote_code=code)
    return config


def causal_class(config: transformers.PretrainedConfig, path: Path) -> type[transformers.PreTrainedModel]:
    """The causal language model class of this configuration. Raises UsageError if transformers has none."""
    if reference := (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM"):
        with older_names(path, runs_code=True):
            found: type[transformers.PreTrainedModel] = get_class_from_dynamic_module(reference, path)
        return found
    if not (known := _mapped_class(config)):
        raise UsageError(f"{path} is no causal language model that transformers knows; use another model")
    return known


def _mapped_class(config: transformers.PretrainedConfig) -> type[transformers.PreTrainedModel] | None:
    """transformers' own causal language model of this configuration; None if it has none."""
    found: type[transformers.PreTrainedModel] | None = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found


def _auto_class(config: transformers.PretrainedConfig) -> Any:
    """transformers' auto class for a model: remote code names it in ``auto_map``, others are known by configuration."""
    auto_map = getattr(config, "auto_map", None) or {}
    vision = next(
        (name for name in ("AutoModelForImageTextToText", "AutoModelForVision2Seq") if name in auto_map), None
    )
    if "AutoModelForCausalLM" in auto_map or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if vision:
        return getattr(transformers, vision, transformers.AutoModelForImageTextToText)
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModel


def _own_attention(path: Path, config: transformers.PretrainedConfig, dtype: torch.dtype) -> str:
    """The attention of a model that has no ring: torch's kernel, but not in the exact tier, which wants plain products,
    and not where the scores are soft-capped or the model has no use for the kernel."""
    has_no_kernel = not getattr(_mapped_class(config), "_supports_sdpa", True)
    return "eager" if dtype == torch.float64 or beyond_kernels(path) or has_no_kernel else "sdpa"
