"""Runs the ranks of a worker group on several hosts, which an engine (torchrun or Ray) starts.

    host.py        the process of a host: it starts ranks there and speaks for them
    relay.py       the controller's thread that speaks with all hosts
    controller.py  which hosts have joined, worker groups on them, and the slots that cells lease

Messages travel over what the engine has for them (conformance.runtime.messages.Carrier). The engines are commands:
conformance.cli.torchrun and conformance.cli.ray. Everything that ranks write goes to the output folder, which all hosts
have to share.
"""
