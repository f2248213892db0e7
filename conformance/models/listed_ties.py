"""Lets current transformers tie weights that the code of a folder names in the form of transformers 4."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from transformers import PreTrainedModel


@contextlib.contextmanager
def listed_ties() -> Iterator[None]:
    """Accepts a list as ``_tied_weights_keys``, where transformers 5 needs a dictionary, inside the ``with`` block.

    Published code, such as openPangu's, lists the weights that are tied to the input embedding.
    """
    expand = PreTrainedModel.get_expanded_tied_weights_keys

    def expanded(model: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(listed := model._tied_weights_keys, list | tuple | set):
            embedding = model.get_input_embeddings()
            source = next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)
            model._tied_weights_keys = {name: source for name in listed if name.endswith("weight") and name != source}
        return expand(model, *arguments, **options)

    with mock.patch.object(PreTrainedModel, "get_expanded_tied_weights_keys", expanded):
        yield
