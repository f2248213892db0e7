"""The oracle: what a scenario should compute, written from the papers, in one process and one document at a time.

Serves claims 1 and 6: every backend is judged against it, so it shares no code with ``impl/`` and uses none of
transformers' modelling code, but for models that it does not know. It is slow and plain on purpose, and meant to be
read next to the papers:

    decoder.py        the model of a role: written here, or of transformers (transformers_decoder.py), then second-class
    architecture.py   config.json -> what the model is: a declaration per family; refuses what it does not know
    parts.py          what a declaration is made of
    positions.py, norm.py, attention.py, feed_forward.py, layer.py    what each part computes
    routing.py        what routers choose for a document, and the loss that balances experts; experts.py: their names
    forward.py        tokens -> logits, or values
    term.py           what a document adds to a loss; objectives.py, rl.py: SFT, GRPO and PPO
    training.py       clipping, SGD, AdamW
    step.py           forward and backward of an optimizer step, over documents
    run.py            a scenario -> a record
"""
