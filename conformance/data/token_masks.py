"""Reads which tokens of a user's record are trained on, from the masks of TRL, verl, OpenRLHF and chat templates.

Any column that is called a mask counts, and all of them together: ``completion_mask``, ``response_mask``,
``loss_mask``, ``assistant_masks``, ``tool_mask``. A mask may have gaps, such as the answers of tools inside a response.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.data.samples import Place

_MASK = re.compile(r"masks?$", re.IGNORECASE)
_PADDING = ("attention_mask", "prompt_mask")  # not of what is trained on, but of what is there
IGNORED = -100  # in ``labels``, for tokens that are not trained on, as in torch's cross entropy


def masks_of(record: Mapping[str, Any]) -> list[str]:
    """Returns the names of the columns that hold masks. None stands for no mask."""
    return [name for name, value in record.items() if _MASK.search(name) and value is not None]


def trained_tokens(record: Mapping[str, Any], place: Place, *, prompt: int, response: int) -> tuple[bool, ...]:
    """Returns whether each of the ``response`` tokens is trained on; all are, without a mask.

    A mask has a number for each token of the response, or of the ``prompt`` and the response. Raises UsageError for any
    other mask, and for padding inside the record.
    """
    trained = [True] * response
    for name in masks_of(record):
        mask = record[name]
        if not isinstance(mask, list) or any(value not in (0, 1) for value in mask):
            raise UsageError(f"{place}: {name!r} must be a list of 0 and 1, got {shown(mask)}")
        if name in _PADDING:
            if not all(mask):
                raise UsageError(f"{place}: {name!r} marks padding; leave the padded tokens out of the record")
            continue
        if len(mask) not in (response, prompt + response):
            raise UsageError(
                f"{place}: {name!r} has {len(mask)} numbers, but the response has {response} tokens and the prompt "
                f"{prompt}; give one number for each token of the response, or of both"
            )
        last = mask[len(mask) - response :]
        trained = [before and bool(value) for before, value in zip(trained, last, strict=True)]
    return tuple(trained)


def check_unmasked(record: Mapping[str, Any], place: Place) -> None:
    """Raises UsageError for a mask that takes tokens of a text away: it belongs to the tokens of another program."""
    for name in masks_of(record):
        mask = record[name]
        if not isinstance(mask, list) or not all(value in (1, True) for value in mask):
            raise UsageError(
                f"{place}: {name!r} masks tokens, but the texts are tokenized here; give 'input_ids' beside it, or "
                f"remove the column to train on the answers as a whole"
            )


def labelled_tokens(record: Mapping[str, Any], place: Place, tokens: Sequence[int]) -> tuple[bool, ...]:
    """Returns whether each of the ``tokens`` of a tokenized sample is trained on, by its labels and masks.

    Raises UsageError for a sample without both, and for labels that are not its tokens.
    """
    labels = record.get("labels")
    if labels is None and not [name for name in masks_of(record) if name not in _PADDING]:
        raise UsageError(
            f"{place}: 'input_ids' without 'labels' or a mask do not say what is trained on; add 'labels', with "
            f"{IGNORED} for the other tokens"
        )
    trained = trained_tokens(record, place, prompt=0, response=len(tokens))
    if labels is None:
        return trained
    if not isinstance(labels, list) or len(labels) != len(tokens):
        raise UsageError(f"{place}: 'labels' must be a list of {len(tokens)} tokens or {IGNORED}, got {shown(labels)}")
    for number, (label, token) in enumerate(zip(labels, tokens, strict=True), start=1):
        if label not in (token, IGNORED):
            raise UsageError(
                f"{place}: entry {number} of 'labels' is {shown(label)}, but must be {token} as in 'input_ids', or "
                f"{IGNORED}; labels are not shifted"
            )
    return tuple(one and label != IGNORED for one, label in zip(trained, labels, strict=True))
