"""Builds the model of a Hugging Face folder as trainers do: by AutoConfig, ``auto_map`` and the declared architecture.

The model comes with its weights, or without them for ranks that read only their own. Three repairs are applied:

Masks separate packed documents. ``create_causal_mask`` does so if it gets positions, but the code of gpt-oss, AFMoE,
OPT, Falcon and others does not pass them on (docs/findings/gpt-oss-packed-positions.md).

Recurrent layers get one document per row. transformers' code for them does not read positions, so convolutions and
recurrent states would run on from one document into the next (docs/findings/recurrent-packed-states.md).

openPangu's published modeling file loads unchanged. It imports ``torch_npu`` and asks it for the device, to choose a
kernel for inference, and it was written for an older transformers. While such a model is loaded, stand-ins exist for
``torch_npu`` and ``torch.npu`` (unless installed), ``LossKwargs`` (now ``TransformersKwargs``), the old arguments of
``create_causal_mask`` (``input_embeds``, ``cache_position``), and the default rotary frequencies in
``ROPE_INIT_FUNCTIONS`` (arXiv 2104.09864, section 3.2.2). Names that the file bound on import stay bound in it, and
nowhere else.
"""

import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import conversion_mapping, masking_utils, modeling_rope_utils
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import import_utils

from conformance.core.errors import UsageError
from conformance.models.folder_checks import BUNDLED_CODE, folder_code, listed_ties, runs_code
from conformance.models.folders import weight_files
from conformance.spec.observables import Head
from impl.interface.sharded_safetensors import fill
from impl.models.family_quirks import needs_loop, unsupported_by_kernels
from impl.models.lazy_weights import UnreadWeights, give_memory, published_buffers, reading_headers, take_origins

conversion_mapping.get_checkpoint_conversion_mapping("")  # fills its cache once, for all ranks that are forked later
MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")
_positions: ContextVar[torch.Tensor | None] = ContextVar("positions", default=None)  # of the running forward pass


def separate_documents(model: transformers.PreTrainedModel) -> None:
    """Makes the masks of ``model`` depend on the ``position_ids`` that the model is called with.

    The functions that make masks are replaced in the globals of the model's code, for all models of this code. They
    behave as before if they get positions, or if the model gets none.
    """
    code = inspect.unwrap(type(model.base_model).forward).__globals__
    for name in MAKERS:
        if name in code and not hasattr(code[name], "knows_positions"):
            code[name] = _with_positions(code[name])
    model.register_forward_pre_hook(_begin, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)


def recurrent_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules that carry state from token to token: in transformers' models each owns a convolution."""
    return [m for m in model.modules() if any(isinstance(child, torch.nn.Conv1d) for child in m.children())]


def separate_states(model: torch.nn.Module) -> None:
    """Gives recurrent modules of ``model`` the documents of packed rows one by one.

    The positions are those of the last forward pass: a backward pass may compute its layers again.
    """
    if not (recurrent := recurrent_modules(model)):
        return
    documents = Documents()
    model.register_forward_pre_hook(documents.begin, with_kwargs=True)
    for module in recurrent:
        module.forward = functools.partial(documents.one_by_one, module.forward)
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.forward = functools.partial(documents.in_rows, layer.forward)  # type: ignore[method-assign]


class Documents:
    """Unpacks rows into one document per row, padded on the right, from where no state reaches a token; packs them too.

    A module runs once for all documents, because ranks that shard its weights gather them whenever it runs. Its linear
    layers run on packed rows, so padding costs no products.
    """

    def __init__(self) -> None:
        self._places: tuple[Tensor, Tensor] | None = None  # (rows, length): number of the document, position in it
        self._shape = (0, 0)  # of unpacked rows

    def begin(self, _: Any, __: Any, options: dict[str, Any]) -> None:
        positions, self._places = options.get("position_ids"), None
        # A model with images has positions by axis; the first ones are those of the text.
        if positions is not None and positions.ndim == 3:
            positions = positions[0]
        if positions is None or (count := int((positions == 0).sum())) == len(positions):
            return
        number = (positions == 0).flatten().cumsum(0).view_as(positions) - 1
        self._places, self._shape = (number, positions), (count, int(positions.max()) + 1)

    def one_by_one(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Calls ``forward`` with every (rows, length, ...) tensor unpacked; returns its output packed."""
        given = {name: self._unpacked(value) for name, value in options.items()}
        output = forward(*map(self._unpacked, inputs), **given)
        return (self._packed(output[0]), *output[1:]) if isinstance(output, tuple) else self._packed(output)

    def in_rows(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        output: Tensor = self._unpacked(forward(self._packed(x)))
        return output

    def _unpacked(self, packed: Any) -> Any:
        if self._places is None or not isinstance(packed, Tensor) or packed.shape[:2] != self._places[0].shape:
            return packed
        return packed.new_zeros(*self._shape, *packed.shape[2:]).index_put(self._places, packed)

    def _packed(self, unpacked: Tensor) -> Tensor:
        return unpacked if self._places is None else unpacked[self._places]


def _begin(_: Any, __: Any, options: dict[str, Any]) -> None:
    _positions.set(options.get("position_ids"))


def _end(*_: Any) -> None:
    _positions.set(None)


def _with_positions(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*arguments: Any, **options: Any) -> Any:
        if options.get("position_ids") is None:
            options["position_ids"] = _positions.get()
        return make(*arguments, **options)

    made.knows_positions = True  # type: ignore[attr-defined]
    return made


NEEDS = ("torch_npu", "LossKwargs")  # words in a Python file of the folder that show the need of stand-ins


@contextlib.contextmanager
def older_transformers(folder: Path, *, runs_code: bool) -> Iterator[bool]:
    """Provides stand-ins while the model in ``folder`` loads; yields whether its Python code runs and needs any."""
    if not runs_code or not _needs_stand_ins(folder):
        yield False
        return
    import_utils.is_torch_npu_available()  # transformers caches the answer, which must be that of the machine
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("torch_npu") is None:
            stack.enter_context(mock.patch.dict(sys.modules, _npu()))
            stack.enter_context(mock.patch.object(torch, "npu", _Device, create=True))
        current = transformers.utils.TransformersKwargs
        stack.enter_context(mock.patch.object(transformers.utils, "LossKwargs", current, create=True))
        stack.enter_context(mock.patch.object(masking_utils, "create_causal_mask", _create_causal_mask))
        stack.enter_context(mock.patch.dict(modeling_rope_utils.ROPE_INIT_FUNCTIONS, {"default": default_frequencies}))
        yield True


def _needs_stand_ins(folder: Path) -> bool:
    if folder_code(folder) == BUNDLED_CODE:
        return False
    return any(word in file.read_text(encoding="utf-8") for file in folder.glob("*.py") for word in NEEDS)


def fill_rotary_tables(model: torch.nn.Module) -> None:
    """Computes frequencies that transformers leaves uninitialised.

    transformers loads a model without memory first, and then asks ``_init_weights`` for what no file contains; in older
    code this function only knows weights.
    """
    for module in model.modules():
        if (make := getattr(module, "rope_init_fn", None)) is not None:
            rotary: Any = module
            frequencies, rotary.attention_scaling = make(rotary.config, None)
            rotary.inv_freq.copy_(frequencies)
            rotary.original_inv_freq = rotary.inv_freq


def default_frequencies(config: Any, device: Any = None, seq_len: int | None = None) -> tuple[Tensor, float]:
    """Returns theta^(-2i / E) for each pair of a head (E / 2,), and the factor 1 of cos and sin."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") or config.rope_theta
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / size
    return 1.0 / theta**exponents, 1.0


class _Device:
    """Stands in for ``torch.npu`` on a machine without such a device."""

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return ""


def _npu() -> dict[str, ModuleType]:
    names = ("torch_npu", "torch_npu.contrib", "torch_npu.contrib.transfer_to_npu")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    return modules


_current_mask = masking_utils.create_causal_mask


def _create_causal_mask(
    config: Any, *, input_embeds: Tensor | None = None, cache_position: Tensor | None = None, **arguments: Any
) -> Any:
    if input_embeds is not None:
        arguments["inputs_embeds"] = input_embeds
    return _current_mask(config=config, **arguments)


def empty_model(
    path: Path, *, dtype: torch.dtype, attention: str | None, head: Head = "causal", trusted: bool = False
) -> transformers.PreTrainedModel:
    """Builds the model in ``dtype``, in training mode, with buffers and without the numbers of its parameters.

    The parameters lie on the meta device; the model's attribute ``unread`` (impl.models.lazy_weights.UnreadWeights)
    knows their numbers in files.

    With the head ``causal``, it is a causal language model if the folder declares one, else image-text-to-text, else
    the bare AutoModel; with the head ``value``, see ``value_class``. ``attention``: transformers' name of the attention
    implementation; None selects torch's kernel if the model supports it, else plain products. ``trusted``: the folder's
    Python code may be run. Raises UsageError if that code has to be run and is not trusted, and if the folder's weights
    are not exactly the model's.
    """
    code, config = runs_code(path, trusted=trusted), read_config(path, trusted=trusted)
    with older_transformers(path, runs_code=code) as are_needed, listed_ties(), reading_headers():
        loader = value_class(causal_class(config, path, code=code)) if head == "value" else _auto_class(config)
        model, found = loader.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention or _own_attention(path, config),
            output_loading_info=True,
            # transformers' default is a grouped kernel for experts, which does not support float64.
            **({"experts_implementation": "eager"} if dtype == torch.float64 or needs_loop(path) else {}),
            **({} if head == "value" else {"trust_remote_code": code}),
        )
        if are_needed:
            fill_rotary_tables(model)
        model.untrained = _untrained(model)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, found[kind])):
            raise UsageError(
                f"the weights in {path} do not fit {type(model).__name__}: {kind.replace('_', ' ')} {names[:8]}; a "
                f"parameter must not keep random numbers, so give the complete folder of this model"
            )
    model.unread = take_origins(model, weight_files(path))
    model.config.use_cache = False
    separate_documents(model)
    separate_states(model)
    for buffer in published_buffers(model).values():
        buffer.data = buffer.data.to(torch.promote_types(buffer.dtype, dtype))  # some stay float32 in a float64 model
    return model.train()


def _untrained(model: transformers.PreTrainedModel) -> frozenset[str]:
    """Returns the names of the parameters that the model's code freezes; loading makes all of them trainable."""
    code = inspect.getmodule(type(model.base_model))
    if code is None or "requires_grad" not in inspect.getsource(code):
        return frozenset()
    with torch.device("meta"):
        built = type(model)(model.config)
    return frozenset(name for name, parameter in built.named_parameters() if not parameter.requires_grad)


def load_model(
    path: Path, *, dtype: torch.dtype, attention: str | None, head: Head = "causal", trusted: bool = False
) -> transformers.PreTrainedModel:
    """Builds the model as ``empty_model`` does, with all of its numbers in host memory."""
    model = empty_model(path, dtype=dtype, attention=attention, head=head, trusted=trusted)
    unread: UnreadWeights = model.unread
    give_memory(model, lambda empty: torch.empty_like(empty, device="cpu"))
    with unread.opened("cpu") as read, torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter, name, [0] * parameter.dim(), read.region)
    del model.unread
    return model


def value_class(causal: type[transformers.PreTrainedModel]) -> type[transformers.PreTrainedModel]:
    """Makes the class of a value model from the language model ``causal``, with one number per token as output.

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
    """Reads the configuration in a Hugging Face folder. Raises UsageError for untrusted code, as ``load_model``."""
    code = runs_code(path, trusted=trusted)
    config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(path, trust_remote_code=code)
    return config


def causal_class(
    config: transformers.PretrainedConfig, path: Path, *, code: bool
) -> type[transformers.PreTrainedModel]:
    """Returns the causal language model class of this configuration, from the folder if its ``code`` runs.

    Raises UsageError if there is none.
    """
    if code and (reference := (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")):
        with older_transformers(path, runs_code=True):
            found: type[transformers.PreTrainedModel] = get_class_from_dynamic_module(reference, path)
        return found
    if not (known := _mapped_class(config)):
        raise UsageError(f"transformers knows no causal language model for {path}; use another model")
    return known


def _mapped_class(config: transformers.PretrainedConfig) -> type[transformers.PreTrainedModel] | None:
    """Returns transformers' own causal language model class of this configuration; None if there is none."""
    found: type[transformers.PreTrainedModel] | None = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found


def _auto_class(config: transformers.PretrainedConfig) -> Any:
    """Returns transformers' auto class for a model, by ``auto_map`` for remote code, else by the configuration."""
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


def _own_attention(path: Path, config: transformers.PretrainedConfig) -> str:
    """Returns the attention of a model without context parallelism: torch's kernel, or "eager" where it does not fit.

    It does not fit soft-capped scores, and models that do not support the kernel.
    """
    has_no_kernel = not getattr(_mapped_class(config), "_supports_sdpa", True)
    return "eager" if unsupported_by_kernels(path) or has_no_kernel else "sdpa"
