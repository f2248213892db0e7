"""What a Hugging Face model itself allows, for the adapters that run any of them; the answer needs no ranks."""

from conformance.backend import Support, Supported, Unsupported
from conformance.layout import Layout
from conformance.paths import resolve
from conformance.scenario import Scenario


def model_support(scenario: Scenario, layout: Layout, *, has_plan: bool = False) -> Support:
    """Supported, or Unsupported with what the model lacks for this layout.

    ``has_plan``: the backend has a tensor-parallel plan for the model, which then needs none of its own. Code of the
    model's folder says nothing of its attention; a layer that no ring reaches is found when it runs. Raises
    UsageError if that code has to be run and is not trusted, and for what is no causal language model.
    """
    shards_sequence = layout.sp * layout.ulysses > 1
    if layout.tp == 1 and not shards_sequence:
        return Supported()
    from impl.models import causal_class, read_config  # imports transformers, which takes seconds

    folder = resolve(scenario.model)
    config = read_config(folder, trusted=scenario.trust_remote_code)
    model = causal_class(config, folder)
    if layout.tp > 1 and not has_plan and not config.get_text_config().base_model_tp_plan:
        return Unsupported(f"{model.__name__} carries no tensor-parallel plan; use tp1")
    if shards_sequence and not model._supports_attention_backend and not getattr(config, "auto_map", None):
        return Unsupported(f"{model.__name__} has attention of its own, in whose place no ring can stand; use sp1")
    return Supported()
