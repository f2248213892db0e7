"""Ranks of one world on several hosts: an agent on each host starts them and speaks for them.

    stream.py    messages over TCP, after both sides have shown that they know the secret
    offer.py     what an agent offers, and why a controller may refuse it
    agent.py     the process of a host: `parity agent`
    relay.py     the controller's process that agents connect to; to the controller it is what a zygote is
    fleet.py     the controller's handles of it: which agents have come, and worlds on them
    slots.py     what cells lease of agents
    torchrun.py  agents and controller as one job of torchrun
    on_ray.py    the same on a Ray cluster

Everything that ranks write goes to the output folder, which all hosts have to share.
"""
