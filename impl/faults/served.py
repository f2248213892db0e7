"""Plants faults in what is served from a process of its own: rollout engines, and the text stages of `parity train`.

Of the engine ``transformers`` they change what it loads, and how it takes new weights; ``cells`` names the way of an
update. Of text they change what conversations become before any weights see them; ``cells`` names the chat template
with which a fault shows. ``stage`` is the check that has to find a fault.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.backends.faults import FaultCells, Function
from impl.faults.declaration import Faults

ENGINE_SEAMS: Mapping[str, str] = {
    "copy_tensors": "(model, tensors): copies named tensors into the parameters of a model",
    "serve_folder": "(folder, ...) -> the sampler with the model of a Hugging Face folder",
    "next_token": "(engine, prompts, decoding) -> log-probs of the tokens that may follow",
}
ENGINE_FAULTS = Faults()
Mixed = Callable[[str, Tensor, Tensor], Tensor]  # name, new and old numbers: what is copied


def _cell(model: str, *, scenario: str = "sft-packed", way: str = "tensors") -> FaultCells:
    return FaultCells(scenario=scenario, model=model, layouts={"transformers": way})


def _mixed(copy_tensors: Function, model: Any, tensors: Mapping[str, Tensor], mix: Mixed) -> None:
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    copy_tensors(model, {name: mix(name, new, own[name]) for name, new in tensors.items()})


@ENGINE_FAULTS.add(
    summary="an update returns without an error and copies nothing",
    source="https://github.com/verl-project/verl/pull/7495, where the base is sent again, without the adapter",
    stage="update: stale: all weights are old",
    cells=_cell("qwen3"),
    needs="an update",
)
def stale_weights(copy_tensors: Function, model: Any, tensors: Any) -> None:
    """Copies nothing."""


@ENGINE_FAULTS.add(
    summary="the part of the second of two tensor-parallel ranks is not sent",
    source="https://github.com/vllm-project/vllm/pull/2379",
    stage="update: partly new: the shards of rank 1 of 2 are old",
    cells=_cell("qwen3"),
    needs="an update",
)
def shard_not_sent(copy_tensors: Function, model: Any, tensors: Any) -> None:
    def mix(name: str, new: Tensor, old: Tensor) -> Tensor:
        dim = 1 if re.search("o_proj|down_proj", name) else 0
        return torch.cat((new.chunk(2, dim)[0], old.chunk(2, dim)[1]), dim) if new.dim() > 1 else new

    _mixed(copy_tensors, model, tensors, mix)


@ENGINE_FAULTS.add(
    summary="norm weights are left out of an update",
    source="https://github.com/vllm-project/vllm/issues/48312",
    stage="update: partly new: old: norms;",
    cells=_cell("qwen3"),
    needs="an update",
)
def norms_skipped(copy_tensors: Function, model: Any, tensors: Mapping[str, Tensor]) -> None:
    copy_tensors(model, {name: tensor for name, tensor in tensors.items() if "norm" not in name})


@ENGINE_FAULTS.add(
    summary="linear layers keep the packed copies that were made of them at load",
    source="https://github.com/sgl-project/sglang/issues/26032",
    stage="update: partly new: old: all linear layers; new: norms, the embedding, the head",
    cells=_cell("qwen3"),
    needs="an update",
)
def packed_layers_kept(copy_tensors: Function, model: Any, tensors: Mapping[str, Tensor]) -> None:
    copy_tensors(model, {name: tensor for name, tensor in tensors.items() if "_proj" not in name})


@ENGINE_FAULTS.add(
    summary="the logits of a model with a tied head are computed with the old embedding",
    source="docs/findings/vllm-cpu-half-new.md",
    stage="update: partly new: old: the head; new: all linear layers, norms, the embedding",
    cells=_cell("qwen3"),
    needs="an update of a model whose head is its embedding",
)
def tied_head_kept(copy_tensors: Function, model: Any, tensors: Any) -> None:
    head = model.lm_head
    kept = head.weight.detach().clone()
    copy_tensors(model, tensors)
    head.weight = torch.nn.Parameter(kept, requires_grad=False)


def _reordered(tensors: Mapping[str, Tensor], parts: str, order: str, first: str) -> dict[str, Tensor]:
    """Cuts each fused matrix, which was made in ``order``, in the order of ``parts``."""
    found = dict(tensors)
    for name in (name for name in tensors if first in name):
        names = [name.replace(first, part) for part in parts.split()]
        fused = torch.cat([tensors[name.replace(first, part)] for part in order.split()])
        found |= dict(zip(names, fused.split([len(tensors[one]) for one in names]), strict=True))
    return found


@ENGINE_FAULTS.add(
    summary="q, k and v are fused in another order than they are read",
    source="https://github.com/vllm-project/tpu-inference/pull/3477, on layouts of fused projections",
    stage="update: neither: q, k, v were loaded in the order k, q, v",
    cells=_cell("qwen2"),
    needs="an update",
)
def qkv_reordered(copy_tensors: Function, model: Any, tensors: Any) -> None:
    copy_tensors(model, _reordered(tensors, "q_proj k_proj v_proj", "k_proj q_proj v_proj", "q_proj"))


@ENGINE_FAULTS.add(
    summary="gate and up are fused in another order than they are read",
    source="https://github.com/vllm-project/tpu-inference/pull/3477, on layouts of fused projections",
    stage="update: neither: gate, up were loaded in the order up, gate",
    cells=_cell("qwen3"),
    needs="an update",
)
def gate_up_reordered(copy_tensors: Function, model: Any, tensors: Any) -> None:
    copy_tensors(model, _reordered(tensors, "gate_proj up_proj", "up_proj gate_proj", "gate_proj"))


@ENGINE_FAULTS.add(
    summary="experts are counted from another expert-parallel rank",
    source="https://github.com/vllm-project/vllm/pull/52497, which sends each rank the experts that it holds",
    stage="update: neither: expert i has the weights of expert i + 1",
    cells=_cell("mixtral"),
    needs="an update of a mixture of experts",
)
def experts_rotated(copy_tensors: Function, model: Any, tensors: Mapping[str, Tensor]) -> None:
    copy_tensors(model, {n: t.roll(-1, 0) if ".experts." in n else t for n, t in tensors.items()})


@ENGINE_FAULTS.add(
    summary="one expert of each layer is not updated",
    source="https://github.com/NovaSky-AI/SkyRL/pull/1471",
    stage="update: partly new: expert 2 is old in all layers",
    cells=_cell("mixtral"),
    needs="an update of a mixture of experts",
)
def expert_skipped(copy_tensors: Function, model: Any, tensors: Any) -> None:
    def mix(name: str, new: Tensor, old: Tensor) -> Tensor:
        return torch.cat((new[:2], old[2:3], new[3:])) if ".experts." in name else new

    _mixed(copy_tensors, model, tensors, mix)


@ENGINE_FAULTS.add(
    summary="the frozen base is served without the adapter",
    source="https://github.com/verl-project/verl/pull/7495",
    stage="update: neither: the adapter is left out: the base alone",
    cells=_cell("qwen3", scenario="sft-lora", way="adapter"),
    needs="adapters (lora)",
)
def base_without_adapter(copy_tensors: Function, model: Any, tensors: Mapping[str, Tensor]) -> None:
    copy_tensors(model, {name: tensor * 0 if "lora_B" in name else tensor for name, tensor in tensors.items()})


@ENGINE_FAULTS.add(
    summary="an adapter is served with scale 1",
    source="https://github.com/NVIDIA/TensorRT-LLM/issues/1477",
    stage="update: neither: the adapter's scale is dropped",
    cells=_cell("qwen3", scenario="sft-lora", way="adapter"),
    needs="adapters (lora) whose scale is not 1",
)
def adapter_scale_dropped(copy_tensors: Function, model: Any, tensors: Any) -> None:
    copy_tensors(model, tensors)
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):  # of peft
            module.scaling = dict.fromkeys(module.scaling, 1.0)


@ENGINE_FAULTS.add(
    summary="keys and values of prompts that were served before outlive an update",
    source="https://github.com/vllm-project/vllm/issues/9744",
    stage="update: new, but the prefix cache was kept",
    cells=_cell("qwen3"),
    needs="an update, and a prompt that is served before and after it",
)
def prefix_cache_kept(next_token: Function, engine: Any, prompts: Any, decoding: Any) -> Tensor:
    rows = next_token(engine, prompts, decoding)
    cache = engine.__dict__.setdefault("cached_rows", {})
    return torch.stack([cache.setdefault(tuple(one), row) for one, row in zip(prompts, rows, strict=True)])


@ENGINE_FAULTS.add(
    summary="an update breaks off in the middle, with an error",
    source="https://github.com/sgl-project/sglang/issues/26032",
    stage="update: raised: RuntimeError: the trainer is gone; the engine is left partly new",
    cells=_cell("qwen3"),
    needs="an update",
)
def broken_off(copy_tensors: Function, model: Any, tensors: Mapping[str, Tensor]) -> None:
    copy_tensors(model, {name: tensor for name, tensor in tensors.items() if "layers.1" not in name})
    raise RuntimeError("the trainer is gone")


@ENGINE_FAULTS.add(
    summary="the engine ignores the scaling of rotary positions",
    source="https://github.com/Blaizzy/mlx-vlm/pull/1710",
    stage="scored log-probs: rotary positions are not scaled",
    cells=_cell("llama3"),
    needs="a model whose rotary positions are scaled",
)
def rope_scaling_ignored(serve_folder: Function, folder: Any, *arguments: Any, **options: Any) -> Any:
    engine = serve_folder(folder, *arguments, **options)
    rotary = engine.model.model.rotary_emb
    config = rotary.config
    dims = len(rotary.inv_freq) * 2
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    rotary.inv_freq = 1.0 / config.rope_parameters["rope_theta"] ** exponents
    return engine


TEXT_SEAMS: Mapping[str, str] = {
    "encode": "(sample, tokenizer) -> the tokens of a conversation, and which of them are trained on",
    "next_row": "(documents, position, data) -> the documents of the next packed row, and the position after them",
    "collate": "(rows) -> the tensors of a micro-batch",
    "epoch_order": "(seed, documents, epoch) -> the order of documents in an epoch",
    "resumed": "(position) -> the position in the data that a checkpoint gives back",
    "rows_of_rank": "(batch, rank, ranks) -> the rows of a data-parallel rank",
}
TEXT_FAULTS = Faults()


def _with(template: str = "qwen2.5") -> FaultCells:
    return FaultCells(scenario="", model=template, layouts={"reference": ""})


@TEXT_FAULTS.add(
    summary="the tokenizer adds a token for the beginning although the template has written it",
    source="https://github.com/OpenRLHF/OpenRLHF/issues/393",
    stage="rendered text",
    cells=_with("gemma3"),
    needs="a template with a token for the beginning",
)
def beginning_twice(encode: Function, sample: Any, tokenizer: Any) -> Any:
    tokens, targets = encode(sample, tokenizer)
    return (tokenizer.bos_token_id, *tokens), (False, *targets)


@TEXT_FAULTS.add(
    summary="each message is rendered alone, so a template writes its default system message again and again",
    source="https://github.com/THUDM/slime/issues/1008",
    stage="rendered text",
    cells=_with(),
    needs="a template that writes more than the message",
)
def messages_rendered_alone(encode: Function, sample: Any, tokenizer: Any) -> Any:
    tokens, _ = encode(sample, tokenizer)
    each = [tokenizer.apply_chat_template([dict(one)], return_dict=False) for one in sample.messages]
    joined = tuple(token for one in each for token in one)
    return joined, (False, *(True for _ in joined[1:])) if len(joined) > 1 else tokens


@TEXT_FAULTS.add(
    summary="the mask is shifted by one token",
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/3739, on masks that miss the generation prompt",
    stage="mask",
    cells=_with(),
    needs="nothing",
)
def mask_shifted(encode: Function, sample: Any, tokenizer: Any) -> Any:
    tokens, targets = encode(sample, tokenizer)
    return tokens, (False, *targets[:-1])


@TEXT_FAULTS.add(
    summary="answers of tools are trained on as the model's own",
    source="https://github.com/PrimeIntellect-ai/prime-rl/pull/978",
    stage="mask",
    cells=_with(),
    needs="a conversation with a tool",
)
def tools_trained(encode: Function, sample: Any, tokenizer: Any) -> Any:
    tokens, targets = encode(sample, tokenizer)
    if any(message["role"] == "tool" for message in sample.messages):
        first = targets.index(True)
        targets = (*targets[:first], *(True for _ in targets[first:]))
    return tokens, targets


@TEXT_FAULTS.add(
    summary="the mask goes on to the end of the conversation after the first answer",
    source="https://github.com/huggingface/transformers/pull/47326",
    stage="mask",
    cells=_with(),
    needs="a conversation of several answers",
)
def mask_to_the_end(encode: Function, sample: Any, tokenizer: Any) -> Any:
    tokens, targets = encode(sample, tokenizer)
    first = targets.index(True)
    return tokens, (*targets[:first], *(True for _ in targets[first:]))


@TEXT_FAULTS.add(
    summary="the token that ends an answer is masked, so the model never learns to stop",
    source="https://github.com/huggingface/trl/issues/1623",
    stage="mask",
    cells=_with(),
    needs="an end token that is also that of padding, in a library that masks padding by its token",
)
def ends_masked(encode: Function, sample: Any, tokenizer: Any) -> Any:
    tokens, targets = encode(sample, tokenizer)
    return tokens, tuple(one and token != tokenizer.eos_token_id for token, one in zip(tokens, targets, strict=True))


@TEXT_FAULTS.add(
    summary="a packed row is filled with the start of the next document, and the rest of that document is lost",
    source="https://github.com/huggingface/trl/pull/4632",
    stage="packing",
    cells=_with(),
    needs="packing",
)
def packed_document_cut(next_row: Function, documents: Any, position: Any, data: Any) -> Any:
    row, after = next_row(documents, position, data)
    room = data.max_len - sum(len(one.tokens) for one in row)
    if not room or after.consumed >= len(documents):
        return row, after
    (number,), beyond = after.take(1)
    cut = replace(documents[number], tokens=documents[number].tokens[:room], targets=documents[number].targets[:room])
    return (*row, cut), beyond


@TEXT_FAULTS.add(
    summary="positions count on through a packed row",
    source="https://github.com/huggingface/nanoVLM/issues/201",
    stage="positions",
    cells=_with(),
    needs="packing",
)
def positions_count_on(collate: Function, rows: Any) -> Any:
    batch = collate(rows)
    counted = batch.real.long().cumsum(1) - 1
    return replace(batch, positions=counted)


@TEXT_FAULTS.add(
    summary="the last token of a packed document predicts the first token of the next one",
    source="https://github.com/huggingface/trl/issues/1230",
    stage="positions",
    cells=_with(),
    needs="packing, and a document whose first token is a target",
)
def next_document_predicted(collate: Function, rows: Any) -> Any:
    batch, labels = collate(rows), []
    for row in rows:
        tokens = [token for one in row.documents for token in one.tokens]
        labels.append([*tokens[1:], -100])
    return replace(batch, labels=batch.labels.new_tensor(labels))


@TEXT_FAULTS.add(
    summary="every epoch has the order of the first, because the sampler is not told the epoch",
    source="https://github.com/pytorch/pytorch/issues/31771",
    stage="order",
    cells=_with(),
    needs="more than one epoch",
)
def epoch_not_set(epoch_order: Function, seed: int, documents: int, epoch: int) -> Any:
    return epoch_order(seed, documents, 0)


@TEXT_FAULTS.add(
    summary="each rank reads all rows from the first one",
    source="https://github.com/yangkky/distributed_tutorial/issues/5",
    stage="order",
    cells=_with(),
    needs="more than one rank",
)
def ranks_read_the_same(rows_of_rank: Function, batch: Any, rank: int, ranks: int) -> Any:
    return rows_of_rank(batch, 0, ranks)


@TEXT_FAULTS.add(
    summary="after a resume in the middle of an epoch its first samples are trained on again",
    source="https://github.com/modelscope/ms-swift/issues/10050",
    stage="resume",
    cells=_with(),
    needs="a resume in the middle of an epoch",
)
def samples_repeated(resumed: Function, position: Any) -> Any:
    return replace(resumed(position), consumed=0)
