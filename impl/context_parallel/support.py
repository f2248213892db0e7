"""Declares supported cells and known defects of context-parallel attention, for the adapters of all backends.

It needs neither ranks nor an import of ring_flash_attn.
"""

from importlib.util import find_spec

from conformance.backends.protocol import Support, Supported, Unsupported
from conformance.core.host import resolve
from conformance.core.io import read_json
from conformance.spec.conventions import model_config
from conformance.spec.known_defects import ExpectedDifference, Unmodelled, WindowPerBlock
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario
from impl.models.family_quirks import SINKS, quirks_of, unsupported_by_kernels


def _unpredictable_gradients(scenario: Scenario, _: Layout) -> Unmodelled:
    """Returns the gradients that no oracle can predict.

    In every layer and micro-batch, a race between ranks decides which of two gradients of keys and values arrives. At
    the first step, only gradients that do not pass through any attention must be right.
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
            unmodelled=_unpredictable_gradients,
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
        for ring, most in (("ring", {}), ("zigzag", {"sp": 2}))  # with more ranks, zigzag's output is NaN
    ),
)


INSTALL = "pip install 'backend-parity[ring]'"
_OPTIONS = {"ring", "zigzag", "torchcp"}  # kinds that replace the default


def available() -> bool:
    """Whether ring_flash_attn is installed."""
    return find_spec("ring_flash_attn") is not None


RING_MODULES = (
    ("impl.context_parallel.ring_functions", "impl.context_parallel.torch_context_parallel") if available() else ()
)  # for preload


def ring_support(scenario: Scenario, layout: Layout) -> Support:
    """Returns Supported, or Unsupported with the reason and an alternative."""
    if layout.sp == layout.ulysses == 1:
        return Supported()
    lacking, options = unsupported_by_kernels(resolve(scenario.model)), _OPTIONS & set(layout.options)
    if lacking == SINKS and (options or layout.ulysses > 1):
        return Unsupported(f"{', '.join(options) or 'Ulysses'} has no {SINKS}; use default context parallelism (sp2)")
    if lacking and lacking != SINKS:
        return Unsupported(f"the kernels of sp and of Ulysses have no {lacking}; use sp1, with dp or tp")
    if layout.ulysses > 1 and quirks_of(kind := model_config(scenario).get("model_type")).latent_attention:
        return Unsupported(f"DeepSpeed's Ulysses needs heads of one size, and {kind} has several; use sp2")
    if not available():
        return Unsupported(f"attention over sequence shards needs the package ring-flash-attn; run: {INSTALL}")
    if "torchcp" in layout.options and scenario.data.packed:
        return Unsupported("PyTorch's context parallel attends over whole rows; leave torchcp out for packed documents")
    if "torchcp" in layout.options and layout.ulysses > 1:
        return Unsupported("PyTorch's context parallel attends over whole rows; leave torchcp out with Ulysses")
    if "torchcp" in layout.options and _sliding_window(scenario.model):
        return Unsupported("PyTorch's context parallel has no sliding window; leave torchcp out: the default has one")
    windowed = next((option for option in ("ring", "zigzag") if option in layout.options), None)
    # With ``shipped`` such a cell runs nevertheless, to show the defect.
    if windowed and "shipped" not in layout.options and _sliding_window(scenario.model):
        return Unsupported(
            f"{windowed} gets sliding windows wrong across ranks (docs/findings/ring-attention-window.md); leave "
            f"{windowed} out: the default is right"
        )
    return Supported()


def _sliding_window(model: str) -> bool:
    """Whether any layer of the model in a Hugging Face folder has a sliding window."""
    config = read_json(resolve(model) / "config.json")
    config = config.get("text_config", config)
    if "layer_types" in config:
        return "sliding_attention" in config["layer_types"]
    return bool(config.get("sliding_window") and config.get("use_sliding_window", True))
