"""Lists the precisions that a scenario can have, every fact that other modules need about a precision, and the oracle
runs by which a cell of it is judged.

To add a precision, add a name to ``PrecisionName`` and a row to ``PRECISIONS``. No other module has a table of
precisions. An adapter changes only if its library needs another setting for the precision.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

# As in files, cell ids and options.
PrecisionName = Literal["exact", "fp32", "bf16", "bf16-reduce", "bf16-nearest", "bf16-stochastic", "fp16"]


@dataclass(frozen=True)
class FloatFormat:
    """Describes a floating-point format. ``name`` is the name of torch's dtype.

    significant_bits: bits of the significand, including the implicit one.
    """

    name: str
    bytes: int
    significant_bits: int

    @property
    def dtype(self) -> "torch.dtype":
        """Returns torch's dtype of this format."""
        import torch  # scenarios and layouts are read without torch

        found: torch.dtype = getattr(torch, self.name)
        return found

    @property
    def rounding(self) -> float:
        """Returns the largest relative error of one rounded operation."""
        return 2.0**-self.significant_bits


F64 = FloatFormat("float64", 8, 53)
F32 = FloatFormat("float32", 4, 24)
BF16 = FloatFormat("bfloat16", 2, 8)
F16 = FloatFormat("float16", 2, 11)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Describes one precision of a scenario.

    compute: the format of activations and matrix products.
    master: the format of master weights, optimizer state and records.
    summing: the format in which gradients of micro-batches and ranks are added up.
    stored: the format of parameters, gradients and moments between two operations, where there are no masters: an
        update is computed in ``master``, and its results are rounded once. None: in ``master``.
    is_stochastic: updated parameters are rounded to ``stored`` up or down at random, with probabilities by which the
        expected value is the exact one; otherwise to the nearest number.
    is_loss_scaled: the loss is multiplied by a dynamic scale, because gradients underflow in ``compute``.
    noise_limit: the largest relative error of a gradient in a single-process run by which a cell can be judged. The
        exact tier has no such runs.
    count_error: how far a token count that is recovered from a loss may be from a whole number; None if the noise of
        the precision hides counts.
    """

    name: PrecisionName
    compute: FloatFormat
    master: FloatFormat
    summing: FloatFormat
    stored: FloatFormat | None = None
    is_stochastic: bool = False
    is_loss_scaled: bool = False
    noise_limit: float
    count_error: float | None = None

    @property
    def is_exact(self) -> bool:
        """Tells whether the whole cell computes in float64, as the reference does."""
        return self.compute == F64

    @property
    def is_half(self) -> bool:
        """Tells whether the cell computes in a format with fewer bits than its master weights."""
        return self.compute != self.master

    @property
    def kept(self) -> FloatFormat:
        """Returns the format of parameters and moments."""
        return self.stored or self.master

    @property
    def half_dtype(self) -> "torch.dtype | None":
        """Returns the dtype to which parameters are cast for computing; None if they stay in the master dtype."""
        return self.compute.dtype if self.is_half else None


PRECISIONS: Mapping[PrecisionName, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="exact", compute=F64, master=F64, summing=F64, noise_limit=0.0, count_error=1e-6),
        Precision(name="fp32", compute=F32, master=F32, summing=F32, noise_limit=1e-4, count_error=1e-3),
        Precision(name="bf16", compute=BF16, master=F32, summing=F32, noise_limit=1 / 6),
        # FSDP's reduce_dtype=bfloat16, which Accelerate sets for bf16, and Megatron-LM's --grad-reduce-in-bf16.
        Precision(name="bf16-reduce", compute=BF16, master=F32, summing=BF16, noise_limit=1 / 6),
        # Parameters in bf16 without masters, as FSDP2 trains a model that was loaded in bf16, and DeepSpeed with
        # bf16_master_weights_and_grads and bf16_optimizer_states.
        Precision(name="bf16-nearest", compute=BF16, master=F32, summing=BF16, stored=BF16, noise_limit=1 / 6),
        Precision(
            name="bf16-stochastic",  # arXiv 2010.06192; torchao's bf16_stochastic_round
            compute=BF16,
            master=F32,
            summing=BF16,
            stored=BF16,
            is_stochastic=True,
            noise_limit=1 / 6,
        ),
        Precision(name="fp16", compute=F16, master=F32, summing=F32, noise_limit=0.1, is_loss_scaled=True),
    )
}
HALF_PRECISIONS = tuple(name for name, precision in PRECISIONS.items() if precision.is_half)
FLOAT64 = "float64"  # the oracle run that cells are compared with
OF_RANKS = "-dp"  # in the name of a run, before the number of data-parallel ranks


def noise_runs(precision: str, data_ranks: int | None = None) -> tuple[str, ...]:
    """Names the oracle runs whose distance to float64 bounds a cell of this precision; none in the exact tier.

    The first run uses torch's fused attention kernel. The second run uses the plain formula, except in passes before
    the first update of a rollout; it is only made if a cell differs by the first run. A backend uses one of the two.
    On a CPU there is a second run in half precision for each number of ``data_ranks`` of a cell, because rounding
    depends on the rows whose embeddings a rank adds up (conformance.oracle.primitives.OneLookup). On a GPU, where it
    does not, ``data_ranks`` is None.
    """
    tier = next((tier for name, tier in PRECISIONS.items() if name == precision and not tier.is_exact), None)
    if not tier:
        return ()
    return precision, f"{precision}-plain" + (f"{OF_RANKS}{data_ranks}" if tier.is_half and data_ranks else "")


def parts_of_run(run: str) -> tuple[str, int]:
    """Returns the name of a run without its number of data-parallel ranks, and this number."""
    name, _, ranks = run.partition(OF_RANKS)
    return name, int(ranks or 1)


def precision_of_run(run: str) -> PrecisionName:
    """Returns the precision in which the oracle computes this run."""
    return next(name for name in PRECISIONS if parts_of_run(run)[0] in (noise_runs(name) or (FLOAT64,)))
