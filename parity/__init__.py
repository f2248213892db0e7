"""Compares training backends with each other and with an independent reference. This is the whole public API.

Record any training loop, and compare two records or logs::

    with parity.record(model, optimizer, out="run-a") as r:
        ...
        r.step(loss=loss)

    print(parity.diff("run-a", "run-b").text())

Run the conformance suite, and read its results as pandas tables::

    result = parity.run(backend="my_package.adapter:MyBackend", profile="quick")
    failed = parity.load(result.out).cells.query("state == 'differs'")

Test a backend of your own: implement ``Backend`` (docs/guides/adding-a-backend.md). ``Scenario``, ``Layout`` and
``Batch`` are what it is given; ``StepMetrics`` and ``Shard`` are what it returns. ``flatten``, ``target_logprobs``,
``label_logprobs``, ``by_row``, ``whole``, ``whole_tensors``, ``shards`` and ``runs_code`` are helpers that most
adapters need; ``Paused``, ``on_cpu`` and ``float64_for`` are for frameworks that own their loop or were written for
GPUs. ``FrameworkAdapter`` with ``Loader`` is a base of such adapters; ``TrainerAdapter`` and ``GrpoTrainerAdapter`` are
for frameworks whose loop is a Hugging Face trainer. Known defects of a library are declared with
``ExpectedDifference``, its conventions with classes such as ``DecaysAll``.

Importing this module imports nothing else; each name is imported when it is used first.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.backends.adapter_bases import FrameworkAdapter, GrpoTrainerAdapter, Loader, TrainerAdapter
    from conformance.backends.adapter_helpers import (
        Paused,
        by_row,
        flatten,
        label_logprobs,
        shards,
        target_logprobs,
        whole,
        whole_tensors,
    )
    from conformance.backends.engines import NotSupported
    from conformance.backends.on_cpu import float64_for, on_cpu
    from conformance.backends.protocol import (
        Backend,
        BackendInfo,
        Cut,
        NamedTensors,
        Shard,
        StepMetrics,
        Support,
        Supported,
        TensorKind,
        Traced,
        TracedModule,
        Unsupported,
    )
    from conformance.backends.text import HuggingFaceText, OrderPlan, TextInfo
    from conformance.core.errors import UsageError
    from conformance.models.folder_checks import runs_code
    from conformance.spec.batch import Batch, Document, Row
    from conformance.spec.conventions import (
        AdvantageEpsilon,
        BiasedWhitening,
        CountEpsilon,
        DecaysAll,
        EntropyByMicroBatch,
        GenerationDenominator,
        GeneratorsNotSaved,
        MetricsByMicroBatch,
        RoundedMasters,
        SchedulePerRollout,
        TrainedPaddingToken,
    )
    from conformance.spec.known_defects import (
        DividedGradients,
        DividedLoss,
        ExpectedDifference,
        LostEmbeddingGradient,
        PaddedSoftmax,
        ResummedHeadNorms,
        Unmodelled,
        WindowPerBlock,
    )
    from conformance.spec.layout import Layout
    from conformance.spec.scenario import Scenario
    from parity.api import Comparison, Frames, RunResult, diff, load, run
    from parity.hf_trainer import TrainerRecord
    from parity.recorder import Recorder, record

__all__ = [
    "AdvantageEpsilon",
    "Backend",
    "BackendInfo",
    "Batch",
    "BiasedWhitening",
    "Comparison",
    "CountEpsilon",
    "Cut",
    "DecaysAll",
    "DividedGradients",
    "DividedLoss",
    "Document",
    "EntropyByMicroBatch",
    "ExpectedDifference",
    "Frames",
    "FrameworkAdapter",
    "GenerationDenominator",
    "GeneratorsNotSaved",
    "GrpoTrainerAdapter",
    "HuggingFaceText",
    "Layout",
    "Loader",
    "LostEmbeddingGradient",
    "MetricsByMicroBatch",
    "NamedTensors",
    "NotSupported",
    "OrderPlan",
    "PaddedSoftmax",
    "Paused",
    "Recorder",
    "ResummedHeadNorms",
    "RoundedMasters",
    "Row",
    "RunResult",
    "Scenario",
    "SchedulePerRollout",
    "Shard",
    "StepMetrics",
    "Support",
    "Supported",
    "TensorKind",
    "TextInfo",
    "Traced",
    "TracedModule",
    "TrainedPaddingToken",
    "TrainerAdapter",
    "TrainerRecord",
    "Unmodelled",
    "Unsupported",
    "UsageError",
    "WindowPerBlock",
    "by_row",
    "diff",
    "flatten",
    "float64_for",
    "label_logprobs",
    "load",
    "on_cpu",
    "record",
    "run",
    "runs_code",
    "shards",
    "target_logprobs",
    "whole",
    "whole_tensors",
]

_NAMES = {
    "parity.recorder": ("record", "Recorder"),
    "parity.hf_trainer": ("TrainerRecord",),
    "parity.api": ("diff", "Comparison", "run", "RunResult", "load", "Frames"),
    "conformance.core.errors": ("UsageError",),
    "conformance.backends.protocol": (
        *("Backend", "BackendInfo", "Support", "Supported", "Unsupported", "StepMetrics", "Shard", "TensorKind"),
        *("NamedTensors", "Traced", "TracedModule", "Cut"),
    ),
    "conformance.spec.scenario": ("Scenario",),
    "conformance.spec.layout": ("Layout",),
    "conformance.spec.batch": ("Batch", "Row", "Document"),
    "conformance.backends.adapter_helpers": (
        *("flatten", "target_logprobs", "label_logprobs", "by_row", "whole", "whole_tensors", "shards", "Paused"),
    ),
    "conformance.backends.adapter_bases": ("FrameworkAdapter", "TrainerAdapter", "GrpoTrainerAdapter", "Loader"),
    "conformance.backends.engines": ("NotSupported",),
    "conformance.backends.text": ("HuggingFaceText", "OrderPlan", "TextInfo"),
    "conformance.backends.on_cpu": ("on_cpu", "float64_for"),
    "conformance.models.folder_checks": ("runs_code",),
    "conformance.spec.known_defects": (
        *("ExpectedDifference", "Unmodelled", "DividedGradients", "DividedLoss", "LostEmbeddingGradient"),
        *("PaddedSoftmax", "ResummedHeadNorms", "WindowPerBlock"),
    ),
    "conformance.spec.conventions": (
        *("AdvantageEpsilon", "BiasedWhitening", "CountEpsilon", "DecaysAll", "EntropyByMicroBatch"),
        "GenerationDenominator",
        *("GeneratorsNotSaved", "MetricsByMicroBatch", "RoundedMasters", "SchedulePerRollout", "TrainedPaddingToken"),
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'parity' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
