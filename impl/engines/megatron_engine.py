"""Serves a model with megatron-core's inference engine: its static one, which runs on a CPU, too.

The model has the library's own attention and rotary positions, which keep keys and values, unlike the model that is
trained (impl.megatron.gpt_model). Its weights are read by the same names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.backends.engines import Decoding, EngineInfo, NotSupported
from conformance.core.errors import UsageError
from conformance.models.folders import weight_files
from conformance.spec.layout import Layout
from conformance.spec.precision import PRECISIONS, Precision, PrecisionName

LONGEST = 512  # tokens of a request
AT_ONCE = 64  # requests


class Numbers:
    """Stands in for a tokenizer: a text is the numbers of its tokens."""

    eod, bos = 0, None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def detokenize(self, tokens: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, tokens))

    def offsets(self, tokens: Sequence[int], _: str) -> list[int]:
        return [0] * len(tokens)


class MegatronEngine:
    """Implements conformance.backends.engines.Engine."""

    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(
            name="megatron",
            packages=("megatron-core", "torch"),
            reports={"raw": {}},
            precisions=("fp32", "bf16", "fp16"),
            experts={},
            ways={
                "folder": "build the model again from the Hugging Face folder",
                "tensors": "read named tensors into the parameters, as the trainer does",
            },
        )

    def __init__(self) -> None:
        from impl.megatron import context, gpt_model, tensors  # noqa: F401 (they import megatron-core, which takes seconds)

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        from impl.megatron.context import MODEL_PARALLEL
        from impl.megatron.device_placement import placed

        self._precision, self._settings, self._device = precision, settings, settings.get("device", "cpu")
        with placed(self._device, exact=False):
            if not dist.is_initialized():
                backend = "gloo" if self._device == "cpu" else "nccl"
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
                MODEL_PARALLEL.enter(Layout(), whole_experts=False)
            self._load(folder, PRECISIONS[precision])

    def _load(self, folder: Path, tier: Precision) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        from impl.megatron.gpt_model import RMSNorm, layer_spec, transformer_config
        from impl.megatron.model_config import ModelShape, read_shape, stages
        from impl.megatron.releases import submodules

        def spec(shape: ModelShape, layer: int) -> Any:
            parts = layer_spec(shape, layer)
            parts.submodules.self_attention.submodules.core_attention = DotProductAttention
            if shape.mixture and layer in shape.mixture.layers:
                submodules(parts.submodules.mlp).router = TopKRouter
            return parts

        try:
            shape = read_shape(folder)
        except UsageError as error:
            raise NotSupported(str(error)) from None
        lacking = {
            "latent attention": shape.latent,
            "sinks": shape.sinks,
            "windows": any(shape.windows),
            "scaled rotary positions": shape.llama3 or shape.yarn,
            "a part of each head turned": shape.rotary_share != 1,
            "experts in groups": shape.mixture and shape.mixture.groups,
        }
        if missing := [name for name, needed in lacking.items() if needed]:
            raise NotSupported(f"{', '.join(missing)} not built in for megatron-core's inference engine")
        config = transformer_config(shape, Layout(), tier, stages(layers=shape.layers, pp=1, vpp=1))
        layers = [spec(shape, layer) for layer in range(shape.layers)]
        model = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
            vocab_size=shape.vocab,  # rows of padding would take part in the softmax
            max_sequence_length=shape.max_positions,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
        )
        model.eval().requires_grad_(False).to(torch.cuda.current_device())
        self._read(model, shape, folder)
        self._model, self._shape = model, shape
        self._engine = self._serving(Float16Module(config, model) if tier.is_half else model, config)

    def _read(self, model: Any, shape: Any, folder: Path) -> None:
        """Reads weights into a model. Those that do not fit it are refused before the first number is copied."""
        from impl.megatron.hf_mapping import check_weights
        from impl.megatron.tensors import read_weights

        check_weights(folder, shape)
        read_weights([model], shape, weight_files(folder), device=self._device)

    def _serving(self, model: Any, config: Any) -> Any:
        from megatron.core.inference.contexts import StaticInferenceContext
        from megatron.core.inference.engines.static_engine import StaticInferenceEngine
        from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
        from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig
        from megatron.core.inference.text_generation_controllers.text_generation_controller import (
            TextGenerationController,
        )

        settings = InferenceWrapperConfig(
            hidden_size=self._shape.hidden,
            params_dtype=config.params_dtype,
            inference_batch_times_seqlen_threshold=-1,
            padded_vocab_size=self._shape.vocab,
            inference_max_requests=AT_ONCE,
            inference_max_seq_length=LONGEST,
        )
        wrapped = GPTInferenceWrapper(model, settings, StaticInferenceContext(AT_ONCE, LONGEST))
        return StaticInferenceEngine(TextGenerationController(wrapped, Numbers(self._shape.vocab)), legacy=True)

    def _answers(self, prompts: Sequence[Sequence[int]], count: int, seed: int = 0, **sampling: Any) -> list[Any]:
        """Returns the requests of one batch, with ``count`` new tokens each."""
        from megatron.core.inference.inference_request import InferenceRequest
        from megatron.core.inference.sampling_params import SamplingParams

        from impl.megatron.device_placement import placed

        asked = SamplingParams(return_log_probs=True, num_tokens_to_generate=count, **sampling)
        asked.add_attributes({"no_early_termination": True})
        with placed(self._device, exact=False):
            self._engine.controller.sampling_rng.manual_seed(seed)
            requests = [
                InferenceRequest(
                    request_id=self._engine.get_new_request_id(),
                    prompt="",
                    prompt_tokens=list(prompt),
                    sampling_params=asked,
                )
                for prompt in prompts
            ]
            answers: list[Any] = self._engine.generate(inference_requests=requests)
        self._engine.scheduler.completed_request_pool.clear()
        return answers

    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        return [one.prompt_log_probs for one in self._answers(requests, 0)]

    def experts(self, requests: Sequence[Sequence[int]]) -> list[Any]:
        from megatron.core.transformer.moe.router import TopKRouter

        routers = [module for module in self._model.modules() if isinstance(module, TopKRouter)]
        found = []
        for request in requests:
            maps: list[Tensor] = []
            handles = [one.register_forward_hook(lambda _, __, out, maps=maps: maps.append(out[1])) for one in routers]
            self._answers([request], 0)
            for handle in handles:
                handle.remove()
            found.append(torch.stack(maps, dim=1).int().topk(routers[0].topk, dim=-1).indices.tolist())
        return found

    def next_token(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> Tensor:
        every = {"top_n_logprobs": self._shape.vocab, "skip_prompt_log_probs": True}
        rows = [one.generated_top_n_logprobs[0] for one in self._answers(prompts, 1, **every)]
        return torch.tensor([[row[str(token)] for token in range(self._shape.vocab)] for row in rows])

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding
    ) -> list[tuple[list[int], list[float]]]:
        """Samples from one generator for the whole batch, which is all that the library has; its seed is the first."""
        lacking = {
            "repetition_penalty": decoding.repetition_penalty != 1,
            "presence_penalty": decoding.presence_penalty,
            "frequency_penalty": decoding.frequency_penalty,
            "min_p": decoding.min_p,
            "top_k together with top_p": decoding.top_k and decoding.top_p < 1,
            "responses that keep their stop token": decoding.stop,
        }
        if missing := [name for name, needed in lacking.items() if needed]:
            raise NotSupported(f"megatron-core's static engine has no {', no '.join(missing)}")
        sampling = {
            "temperature": decoding.temperature or 1.0,
            "top_k": decoding.top_k if decoding.temperature else 1,
            "top_p": decoding.top_p if decoding.top_p < 1 and decoding.temperature else 0.0,
        }
        answers = self._answers(prompts, decoding.max_new_tokens, seeds[0], **sampling)
        return [(one.generated_tokens.tolist(), one.generated_log_probs) for one in answers]

    def update(self, way: str, folder: Path) -> None:
        from impl.megatron.device_placement import placed

        if way == "folder":
            self.start(folder, self._precision, self._settings)
            return
        with placed(self._device, exact=False):
            self._read(self._model, self._shape, folder)
