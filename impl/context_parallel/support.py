"""Known defects of ring_flash_attn's ring and zigzag, for the adapters of all backends that have them.

What the ring layer supports, for the adapters of all backends; the answer needs no ranks and no import of it.
"""

import json
from importlib.util import find_spec

from conformance.backends.protocol import Support, Supported, Unsupported
from conformance.core.paths import resolve
from conformance.spec.known_defects import ExpectedDifference, Unmodelled, WindowPerBlock, model_config
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario
from impl.models.family_quirks import SINKS, beyond_kernels, quirks_of


def _raced(scenario: Scenario, _: Layout) -> Unmodelled:
    """The gradients that no oracle can predict.

    In every layer and micro-batch, a race between ranks decides which of two gradients of keys and values arrives. At
    the first step, only the gradients that do not pass through any attention on their way back have to be right.
    """
    last = model_config(scenario)["num_hidden_layers"] - 1
    below = ("model.embed_tokens.*", *(f"model.layers.{layer}.*" for layer in range(last)))
    into_attention = (f"model.layers.{last}.self_attn.[qkv]_*", f"model.layers.{last}.input_layernorm.*")
    return Unmodelled(stage="gradients", tensors=(*below, *into_attention), onward=True)


RING_DIFFERENCES = (
    *(
        ExpectedDifference(
            reason="ring_flash_attn overwrites the float32 gradients of queries, keys and values that it sums up",
            link="docs/findings/ring-attention-gradients.md",
            unmodelled=_raced,
            options=(ring, "shipped"),
            precisions=("fp32",),
            objectives=("sft",),
        )
        for ring in ("ring", "zigzag")
    ),
    *(
        ExpectedDifference(
            reason="ring_flash_attn applies a sliding window to every block as if it were the query's own",
            link="docs/findings/ring-attention-window.md",
            defects=lambda _, layout: (WindowPerBlock(ranks=layout.sp, zigzag="zigzag" in layout.options),),
            options=(ring, "shipped"),
            at_most=most,
            architectures=("gemma3_text",),
            packed=True,
        )
        for ring, most in (("ring", {}), ("zigzag", {"sp": 2}))  # of more ranks, zigzag's output is NaN
    ),
)


INSTALL = "pip install 'backend-parity[ring]'"
_OTHERS = {"ring", "zigzag", "torchcp"}  # than the default ring


def available() -> bool:
    """Whether ring_flash_attn is installed."""
    return find_spec("ring_flash_attn") is not None


RING_MODULES = (
    ("impl.context_parallel.ring_functions", "impl.context_parallel.torch_context_parallel") if available() else ()
)  # for preload


def ring_support(scenario: Scenario, layout: Layout) -> Support:
    """Supported, or Unsupported with what is wrong with this ring and what to use instead."""
    if layout.sp == layout.ulysses == 1:
        return Supported()
    lacking, others = beyond_kernels(resolve(scenario.model)), _OTHERS & set(layout.options)
    if lacking == SINKS and (others or layout.ulysses > 1):
        return Unsupported(f"{', '.join(others) or 'Ulysses'} has no {SINKS}; use the default ring (sp2)")
    if lacking and lacking != SINKS:
        return Unsupported(f"the kernels of rings and of Ulysses have no {lacking}; use sp1, with dp or tp")
    if layout.ulysses > 1 and quirks_of(kind := model_config(scenario).get("model_type")).latent_attention:
        return Unsupported(f"DeepSpeed's Ulysses wants heads of one size, and {kind} has several; use a ring (sp2)")
    if not available():
        return Unsupported(f"attention over sequence shards needs the package ring-flash-attn; run: {INSTALL}")
    if "torchcp" in layout.options and scenario.data.packed:
        return Unsupported("PyTorch's context parallel attends over whole rows; use another ring for packed documents")
    if "torchcp" in layout.options and layout.ulysses > 1:
        return Unsupported("PyTorch's context parallel attends over whole rows; use another ring with Ulysses")
    if "torchcp" in layout.options and _sliding_window(scenario.model):
        return Unsupported("PyTorch's context parallel has no sliding window; leave torchcp out: the default ring has")
    windowed = next((option for option in ("ring", "zigzag") if option in layout.options), None)
    # With ``shipped`` they run nevertheless, to show the defect.
    if windowed and "shipped" not in layout.options and _sliding_window(scenario.model):
        return Unsupported(
            f"{windowed} gets sliding windows wrong across ranks (docs/findings/ring-attention-window.md); leave "
            f"{windowed} out: the default ring is right"
        )
    return Supported()


def _sliding_window(model: str) -> bool:
    """Whether any layer of the model in a Hugging Face folder has a sliding window."""
    config = json.loads((resolve(model) / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    if "layer_types" in config:
        return "sliding_attention" in config["layer_types"]
    return bool(config.get("sliding_window") and config.get("use_sliding_window", True))
