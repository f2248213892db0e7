"""Plants faults in the text stages of `parity train`: in what conversations become before any weights see them.

``cells`` names the chat template with which a fault shows. ``stage`` is the check that has to find it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from conformance.backends.faults import FaultCells, Function
from impl.faults.declaration import Faults

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
