"""What a backend says of its modules so that a cell can be bisected: which module of this rank is which one of the
Hugging Face model, and how its activations are cut.

Nothing else is taken from the backend: the suite hooks the modules itself, and compares what it sees with the oracle's.
"""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one rank's activations of a micro-batch lie in the whole. They are (rows, length, features).

    length_first: they are (length, rows, features). part, parts: this rank has part number ``part`` of ``parts`` equal
    ones of the length. first_feature: the number of its first feature in the whole; features beyond the whole are
    padding. The tokens that go into an embedding are (rows, length).
    """

    length_first: bool = False
    part: int = 0
    parts: int = 1
    first_feature: int = 0


@dataclass(frozen=True, kw_only=True)
class TracedModule:
    """A module that this rank runs once per micro-batch.

    name: that of the Hugging Face module, such as ``model.layers.0.mlp``. input, output: how what goes in and what
    comes out is cut. The first tensor among its arguments goes in, and the first tensor of its result comes out.
    leaves_bias: the result is (output, bias), and its caller adds the bias, which the Hugging Face module adds itself.
    """

    name: str
    module: torch.nn.Module
    input: Cut = field(default_factory=Cut)
    output: Cut = field(default_factory=Cut)
    leaves_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The modules of this rank, and what they are to be held against.

    tokens: for each micro-batch that this rank runs, int64 (rows, length): the number of the token in the optimizer
        step, whose rows lie end to end, and -1 in padding. The length is that before it is cut by ``Cut.parts``.
    gradient_scale: by how much gradients of activations are larger than those of the step's loss, because the framework
        averages gradients of parameters later.
    """

    modules: tuple[TracedModule, ...]
    tokens: tuple[torch.Tensor, ...]
    gradient_scale: float = 1.0
