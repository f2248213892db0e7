"""Computes a scenario from the papers, in a single process, document by document.

Every backend is judged against this package (docs/principles.md). It shares no code with ``impl/`` and uses
transformers' modelling code only for models that it does not know. The code is slow and plain on purpose, and meant to
be read next to the papers:

    role_model.py       the model of a role: written here, or of transformers (transformers_reference.py)
    primitives.py       dtypes, linear layers, RMSNorm, rotary positions; the points where a defect acts
    attention.py        grouped-query and latent attention
    feed_forward.py     gated MLPs, mixtures of experts, router losses
    decoder.py          tokens -> logits or values, and the weights of a model
    loss_terms.py       what one document adds to a loss; objectives.py, policy_gradient.py: SFT, GRPO and PPO
    optimizer.py        clipping, SGD, AdamW, the fp16 loss scale
    step.py             forward and backward pass of an optimizer step; columns that are computed once per rollout
    run.py              a scenario -> a record
    defects.py          known defects of libraries, reproduced on purpose
"""
