"""Calculates memory and time of parity at 7B, 32B, 70B and a 235B mixture of experts on 8 to 512 GPUs.

    python benchmarks/scaling.py > docs/measurements/scaling.md

Nothing is run. The memory of a rank is the estimate of `parity train` (impl/engine/memory_estimate.py), which tests
compare with the storages of ranks; the additions of a cell are below. The text around the tables is in
benchmarks/scaling.md. The measured points are from reports/published; tests/benchmarks/test_scaling.py compares them.
"""

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.core.host import FIXTURES
from conformance.oracle.role_model import SPARE
from conformance.runner.resource_estimate import LOGITS, ON_GPU
from conformance.spec.layout import Layout
from impl.engine.memory_estimate import Shapes, elements
from impl.train.plan import parameter_shapes, states_of

GIB, FLOAT64 = 2**30, 8
GPU = 139 * GIB  # of an H200
TOKENS = 192  # of a document, in the scenarios of the profile real-size
# Seconds of a cell without a model, for each 1e9 numbers that are gathered, sketched and hashed, and of the oracle for
# each 1e9 parameters. From Megatron tp2 at 1.16 B (22 s, five sets of numbers) and at 8.03 B (56 s, three), and from
# the oracle's run of one step at 8.03 B on two H200 (18.6 s, EIGHT).
START_S, NUMBERS_S, ORACLE_S = 11.0, 1.85, 2.3


@dataclass(frozen=True, kw_only=True)
class Model:
    """Describes a model. shapes: of all parameters. active: number of parameters that a token passes."""

    name: str
    hidden: int
    heads: int
    layers: int
    vocabulary: int
    shapes: Mapping[str, tuple[int, ...]]
    active: int

    @property
    def count(self) -> int:
        return elements(self.shapes)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Describes a cell of a published run, in the exact tier on H200.

    run: its file under reports/published. moments: whether its optimizer is AdamW. peak: GiB of the rank with the most.
    seconds: None for cells that waited for each other, or shared the machine with other programs. rows: of a step
    without accumulation, in the scenario sft-7b; 0: those of sft-real or sft-real-sgd.
    """

    run: str
    model: str
    backend: str
    layout: str
    moments: bool
    peak: float
    seconds: float | None = None
    rows: int = 0


FIRST_1B, FIRST_7B = "2026-11-23-real-size-2xh200/1b.json", "2026-11-23-real-size-2xh200/7b.json"
AGAIN_1B, AGAIN_7B = "2026-11-27-two-h200-again/1b-exact.json", "2026-11-27-two-h200-again/7b-exact.json"
TWO_OF_FOUR, FOUR = "2026-11-27-four-h200/1b.json", "2026-11-26-4xh200-rest/real-size-4gpus-7b.json"
EIGHT = "2026-11-29-eight-ranks/7b.json"
MEASURED = (
    Measured(run=FIRST_1B, model="1.16 B", backend="fsdp2", layout="dp2", moments=True, peak=24.8, seconds=34),
    Measured(run=TWO_OF_FOUR, model="1.16 B", backend="fsdp2", layout="tp2", moments=True, peak=24.3),
    Measured(run=TWO_OF_FOUR, model="1.16 B", backend="fsdp2", layout="sp2", moments=True, peak=24.6),
    Measured(run=AGAIN_1B, model="1.16 B", backend="deepspeed", layout="dp2.zero1", moments=True, peak=39.2),
    Measured(run=AGAIN_1B, model="1.16 B", backend="deepspeed", layout="dp2.zero2", moments=True, peak=36.5),
    Measured(run=AGAIN_1B, model="1.16 B", backend="deepspeed", layout="dp2.zero3", moments=True, peak=38.2),
    Measured(run=AGAIN_1B, model="1.16 B", backend="deepspeed", layout="sp2.zero3", moments=True, peak=38.2),
    Measured(run=AGAIN_1B, model="1.16 B", backend="deepspeed", layout="tp2.zero3", moments=True, peak=45.3),
    Measured(run=FIRST_1B, model="1.16 B", backend="megatron", layout="tp2", moments=True, peak=21.7, seconds=22),
    Measured(run=FIRST_1B, model="1.16 B", backend="megatron", layout="pp2", moments=True, peak=26.3, seconds=45),
    Measured(run=FIRST_7B, model="8.03 B", backend="fsdp2", layout="tp2", moments=False, peak=87.6, seconds=174),
    Measured(run=AGAIN_7B, model="8.03 B", backend="deepspeed", layout="dp2.zero3", moments=False, peak=115.0),
    Measured(run=FIRST_7B, model="8.03 B", backend="megatron", layout="tp2", moments=False, peak=71.9, seconds=56),
    Measured(run=AGAIN_7B, model="8.03 B", backend="megatron", layout="pp2", moments=False, peak=76.1),
    Measured(run=FOUR, model="8.03 B", backend="fsdp2", layout="dp2.tp2", moments=False, peak=50.4),
    Measured(run=FOUR, model="8.03 B", backend="deepspeed", layout="dp4.zero3", moments=False, peak=67.7),
    Measured(run=FOUR, model="8.03 B", backend="megatron", layout="dp2.tp2", moments=False, peak=71.6),
    Measured(run=FOUR, model="8.03 B", backend="megatron", layout="tp2.pp2", moments=False, peak=41.7),
    Measured(run=FOUR, model="8.03 B", backend="megatron", layout="pp4", moments=False, peak=42.6),
    Measured(run=EIGHT, model="8.03 B", backend="fsdp2", layout="dp2.tp2.sp2", moments=False, peak=29.2, rows=8),
    Measured(run=EIGHT, model="8.03 B", backend="fsdp2", layout="dp8", moments=False, peak=34.1, rows=8),
)
LAYOUTS = {
    8: {"fsdp2": "dp8", "deepspeed": "dp8.zero3", "megatron": "tp8"},
    64: {"fsdp2": "dp8.tp8", "deepspeed": "dp8.tp8.zero3", "megatron": "tp8.pp8"},
    512: {"fsdp2": "dp8.sp8.tp8", "deepspeed": "dp8.sp8.tp8.zero3", "megatron": "dp8.tp8.pp8"},
}
WITH_EXPERTS = {  # DeepSpeed has no ``ep`` here
    8: {"fsdp2": "ep8", "megatron": "pp8"},
    64: {"fsdp2": "sp8.ep8", "megatron": "pp8.ep8"},
    512: {"fsdp2": "sp16.tp4.ep8", "megatron": "sp8.pp8.ep8"},
}
ROWS, ACCUMULATION = 16, 2  # of a step


def of_folder(name: str, folder: Path) -> Model:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shapes = parameter_shapes(folder, "causal")
    return Model(
        name=name,
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        layers=config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        shapes=shapes,
        active=elements(shapes),
    )


def of_sizes(name: str, like: str, **sizes: int) -> Model:
    """Makes a model of a fixture's family (a configuration without weights) with other sizes."""
    config = json.loads((FIXTURES / "models" / like / "config.json").read_text(encoding="utf-8")) | sizes
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return of_folder(name, Path(folder))


def with_experts(dense: Model, *, experts: int, chosen: int, width: int) -> Model:
    """Replaces the MLP of each layer by experts of this width, stacked as in transformers."""
    shapes = {name: shape for name, shape in dense.shapes.items() if ".mlp." not in name}
    outside = elements(shapes)
    for layer in range(dense.layers):
        mlp = f"model.layers.{layer}.mlp"
        shapes[f"{mlp}.gate.weight"] = (experts, dense.hidden)
        shapes[f"{mlp}.experts.gate_up_proj"] = (experts, 2 * width, dense.hidden)
        shapes[f"{mlp}.experts.down_proj"] = (experts, dense.hidden, width)
    of_token = outside + dense.layers * dense.hidden * (experts + 3 * chosen * width)
    return Model(**{**vars(dense), "shapes": shapes, "active": of_token})


def measured_models() -> dict[str, Model]:
    """Returns the two measured models."""
    names = {"1.16 B": "openpangu-embedded-1b", "8.03 B": "openpangu-embedded-7b"}
    return {name: of_folder(name, FIXTURES / "models" / folder) for name, folder in names.items()}


def models() -> list[Model]:
    """Returns openPangu-Embedded-7B, Qwen3-32B, Llama-3-70B and Qwen3-235B-A22B, by their published sizes."""
    sizes_32b = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
    sizes_70b = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    sizes_235b = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "vocab_size": 151936}
    dense = of_sizes("Qwen3-235B-A22B", "qwen3-8b", **sizes_235b, num_attention_heads=64, num_key_value_heads=4)
    return [
        of_folder("openPangu-7B", FIXTURES / "models" / "openpangu-embedded-7b"),
        of_sizes("Qwen3-32B", "qwen3-8b", **sizes_32b, num_attention_heads=64, num_key_value_heads=8),
        of_sizes("Llama-3-70B", "llama-3-8b", **sizes_70b, num_attention_heads=64, num_key_value_heads=8),
        with_experts(dense, experts=128, chosen=8, width=1536),
    ]


def rank_bytes(model: Model, backend: str, layout: str, *, moments: bool) -> float:
    """Returns the bytes of a GPU at the peak of a cell in float64.

    They are the states of the backend, activations of a document without recomputation (Korthikanti et al., arXiv
    2205.05198, equation 2, in 8 bytes), its logits, and for the record two copies of the largest whole tensor, which
    FSDP2 needs while it has gathered no block.
    """
    parsed, size, gathered = Layout.parse(layout), 0.0, 0.0
    for layout_of, shapes in _split_experts(parsed, model.shapes):
        states = states_of(backend, layout_of, "exact", shapes, trained=True)
        gathered += states.passing if backend == "fsdp2" else 0
        size += states.weights + states.gradients + states.passing + (states.optimizer + states.update) * moments
        if not moments and backend == "deepspeed":
            size += states.weights  # masters
    tokens = TOKENS / parsed.sp
    each = 34 * tokens * model.hidden + 5 * model.heads * tokens * TOKENS
    activations = each * model.layers * (FLOAT64 / 2) / (parsed.tp * parsed.pp)
    logits = LOGITS * tokens * model.vocabulary * FLOAT64
    record = 2 * FLOAT64 * max(map(math.prod, model.shapes.values()))
    return size + activations + logits + max(0.0, record - gathered)


def _split_experts(layout: Layout, shapes: Shapes) -> list[tuple[Layout, Shapes]]:
    """Splits the experts of a rank from the other parameters, for which the ranks of ``ep`` are data ranks."""
    if layout.ep == 1:
        return [(layout, shapes)]
    experts = {name: (shape[0] // layout.ep, *shape[1:]) for name, shape in shapes.items() if ".experts." in name}
    dense = {name: shape for name, shape in shapes.items() if name not in experts}
    return [(replace(layout, ep=1), experts), (replace(layout, ep=1, dp=layout.dp * layout.ep), dense)]


def seconds(model: Model, *, sets: int) -> float:
    """Returns the seconds of a cell with a cached oracle. ``sets``: recorded numbers per parameter."""
    return START_S + NUMBERS_S * sets * model.count / 1e9


def oracle_gpus(model: Model) -> int:
    """Returns the number of GPUs that hold weights and gradients in float64."""
    return math.ceil(2 * FLOAT64 * model.count / (GPU * (1 - SPARE)))


def measured_rows() -> list[str]:
    found, shapes = [], measured_models()
    for one in MEASURED:
        model = shapes[one.model]
        peak = rank_bytes(model, one.backend, one.layout, moments=one.moments) / GIB
        optimizer = "AdamW, two steps" if one.moments else "SGD, one step"
        run = f"`{one.run}`"
        row = f"| {one.model} | {one.backend} `{one.layout}` | {optimizer} | {run} | **{one.peak:.1f}** | {peak:.1f} | "
        if one.seconds is None:
            found.append(f"{row}| |")
        else:
            found.append(f"{row}**{one.seconds:.0f}** | {seconds(model, sets=5 if one.moments else 3):.0f} |")
    return found


def layouts_of(model: Model) -> dict[int, dict[str, str]]:
    """Returns layouts by number of GPUs, then by backend."""
    return WITH_EXPERTS if model.active < model.count else LAYOUTS


def memory_rows() -> list[str]:
    found = []
    for model in models():
        for gpus, layouts in layouts_of(model).items():
            cells = []
            for backend in ("fsdp2", "deepspeed", "megatron"):
                if backend not in layouts:
                    cells.append("")
                    continue
                need = rank_bytes(model, backend, layouts[backend], moments=False)
                cells.append(f"`{layouts[backend]}` {need / GIB:.0f}{'' if need < GPU else ' (too much)'}")
            found.append(f"| {model.name}, {model.count / 1e9:.1f} B | {gpus} | {' | '.join(cells)} |")
    return found


def time_rows() -> list[str]:
    found = []
    for model in models():
        gpus, oracle = oracle_gpus(model), ORACLE_S * model.count / 1e9
        petaflop = 6 * model.active * ROWS * TOKENS / 1e15
        files = 2 * model.count / GIB
        found.append(
            f"| {model.name} | {files:.0f} | {gpus}{'' if gpus <= 8 else ' (more than a host has)'} | {oracle:.0f} | "
            f"{seconds(model, sets=3):.0f} | {petaflop:.2f} | {8 * ON_GPU / GIB:.0f} |"
        )
    return found


def document() -> str:
    text = (Path(__file__).parent / "scaling.md").read_text(encoding="utf-8")
    tables = {"MEASURED": measured_rows(), "MEMORY": memory_rows(), "TIME": time_rows()}
    for name, rows in tables.items():
        text = text.replace(f"<{name}>", "\n".join(rows))
    return text


if __name__ == "__main__":
    print(document(), end="")
