"""Sampling masks of rollouts: which files are refused, and that both sides take log-probs over what they keep."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.rollouts import read_groups
from conformance.oracle.loss_terms import entropies, target_logprobs
from conformance.spec.batch import KEPT, Document, Row
from conformance.spec.scenario import load_scenario
from impl.interface.micro_batches import collate
from impl.models.outputs import outputs_of

MASK = {"token_ids": [7, 8, 9, 9, 30, 2], "offsets": [0, 2, 5, 6]}
RECORD: dict[str, Any] = {
    **{"group": 0, "prompt_ids": [1, 4], "completion_ids": [7, 9, 2], "logprobs": [-1.2, -0.3, 0.0], "reward": 0.5},
    "sampling_mask": MASK,
}


def documents_of(folder: Path, **changes: Any) -> list[Document]:
    file = folder / "mine.jsonl"
    other = {**RECORD, "completion_ids": [], "logprobs": [], "sampling_mask": {"token_ids": [], "offsets": [0]}}
    file.write_text(f"{json.dumps(other)}\n{json.dumps(RECORD | changes)}\n")
    scenario = load_scenario(
        FIXTURES / "scenarios" / "top-p.toml",
        model="models/llama",
        precision="exact",
        data_overrides={"path": str(file)},
    )
    return read_groups(scenario, vocabulary=400)[0]


def test_columns_hold_the_kept_tokens_of_each_target(tmp_path: Path) -> None:
    empty, document = documents_of(tmp_path)
    kept = [document.columns[f"{KEPT}{k}"] for k in range(3)]
    assert kept == [(0, 0, 8, 10, 3), (0, 0, 9, 10, 0), (0, 0, 0, 31, 0)]
    assert empty.columns[f"{KEPT}0"] == (0, 0)


def test_a_token_of_a_tool_has_no_mask(tmp_path: Path) -> None:
    _, document = documents_of(tmp_path, completion_mask=[1, 0, 1])
    assert document.columns[f"{KEPT}0"] == (0, 0, 8, 0, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "mine.jsonl, line 2: no 'sampling_mask' with token_ids and offsets, but the objective has replay_samp"),
        ([[7], [9], [2]], "no 'sampling_mask' with token_ids and offsets"),
        (MASK | {"offsets": [0, 2, 6]}, "'offsets' of 'sampling_mask' must be 4 rising integers from 0 to 6"),
        (MASK | {"offsets": [0, 5, 2, 6]}, "rising integers from 0 to 6, the number of its 'token_ids', got"),
        (MASK | {"offsets": [0, 2, 5, 5]}, "rising integers from 0 to 6"),
        (MASK | {"token_ids": [7, 8, 9, 9, 30, 400]}, "'token_ids' holds 400, which is not a token of a vocabulary"),
        (MASK | {"token_ids": [7, 8, 8, 31, 30, 2]}, "the sampling mask of token 1 of the response does not hold the"),
    ],
)
def test_a_wrong_mask_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        documents_of(tmp_path, sampling_mask=given)
    assert message in str(refused.value)


def test_both_sides_take_log_probs_over_the_kept_tokens(tmp_path: Path) -> None:
    _, document = documents_of(tmp_path)
    torch.manual_seed(0)
    with torch.device("cpu"):
        logits = torch.randn(5, 400, dtype=torch.float64, requires_grad=True)
    numbers = {"stable": torch.float64, "temperature": 0.8}
    ours = target_logprobs(logits, document, **numbers), entropies(logits, document, **numbers)  # type: ignore[arg-type]
    over_all = (logits / 0.8).log_softmax(-1)
    mass = torch.stack([over_all[1, [7, 8]], over_all[2, [9, 30]]]).logsumexp(-1)
    due = over_all[[1, 2, 3], [7, 9, 2]] - torch.cat([mass, over_all[3, [2]]])
    torch.testing.assert_close(ours[0], due)
    inputs = collate([Row(0, (document,))])
    want = frozenset({"logprobs", "entropy"})
    theirs = outputs_of(logits[None], inputs, head="causal", want=want, temperature=0.8)  # type: ignore[arg-type]
    for own, other in zip(ours, (theirs.logprobs, theirs.entropy), strict=True):
        assert other is not None
        torch.testing.assert_close(other[0, 1:4], own)
        gradients = [torch.autograd.grad(numbers.sum(), logits, retain_graph=True)[0] for numbers in (own, other)]
        torch.testing.assert_close(*gradients)
