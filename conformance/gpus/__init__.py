"""GPUs of this host: cells lease them one by one, so that cells run side by side and runs do not disturb one another.

    inventory.py  which GPUs the user lets us have, by UUID
    shares.py     places of several ranks on one GPU, and what ranks are told of their GPUs
    lease.py      leases of GPUs between processes: locks and a queue, as files
    places.py     what worlds lease, for conformance.world.Pool
    busy.py       how much of a run each GPU was leased

Nothing here asks CUDA: a GPU is a name, and what is leased is the name.
"""
