"""Starts a run on several nodes of a Ray cluster, with an actor on each (``pip install backend-parity[ray]``).

    python -m conformance.cli.ray --nodes 2 --slots 8 run --device cuda --profile full --out /shared/out

A placement group (STRICT_SPREAD) reserves on each node as many GPUs, or processors, as the node offers slots. The
controller runs on the machine that starts this command: in the cluster, or with access to it. Each actor starts the
host process of its node, whose messages are arguments and results of the actor's methods. ``pytest`` and its arguments
may replace ``run``.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from conformance.cli.torchrun import COMMANDS, run_command
from conformance.core.errors import UsageError, one_line
from conformance.core.io import visible_output
from conformance.runtime.failure import exit_words
from conformance.runtime.messages import Closed, Message, Wire, closing, connect, take
from conformance.runtime.multihost.controller import started_by_engine
from conformance.runtime.multihost.host import start_host
from conformance.runtime.preload_server import absolute_path

_RESERVED_S = 300.0  # limit for the cluster to reserve the nodes
_END_S = 10.0  # limit for host processes to end by themselves


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.cli.ray", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="how many nodes of the cluster take part")
    parser.add_argument("--slots", type=int, required=True, help="how many ranks each of them starts")
    parser.add_argument("--ranks-per-gpu", type=int, default=1, help="of parity run")
    parser.add_argument("command", choices=COMMANDS, help="and its options")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of parity run")
    options, rest = parser.parse_known_args(arguments)
    try:
        import ray
    except ImportError:
        print("parity: ray is not installed; pip install 'backend-parity[ray]'", file=sys.stderr)
        return 2
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(absolute_path())}}
    try:
        ray.init(address="auto", log_to_driver=True, configure_logging=False, runtime_env=paths)
    except ConnectionError as error:
        print(f"parity: no Ray cluster is running here ({error}); start one with ray start --head", file=sys.stderr)
        return 2
    try:
        gpus = -(-options.slots // max(1, options.ranks_per_gpu)) if options.device == "cuda" else 0
        with _hosts(ray, nodes=options.nodes, slots=options.slots, gpus=gpus) as wires, started_by_engine(wires):
            prefix = "parity-" if options.command == "pytest" else ""
            where = [f"--{prefix}device", options.device, f"--{prefix}ranks-per-gpu", str(options.ranks_per_gpu)]
            return run_command([options.command, *rest, *where])
    except UsageError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _hosts(ray: Any, *, nodes: int, slots: int, gpus: int) -> Iterator[list[Wire]]:
    """Starts an actor on each of ``nodes`` nodes, in a placement group; yields a wire to each. Raises UsageError."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": slots}
    group = placement_group([needs] * nodes, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=_RESERVED_S)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise UsageError(
            f"the Ray cluster has no {nodes} nodes with {needs} free (waited {_RESERVED_S:g} s); see ray status, or "
            f"request less with --slots and --nodes"
        ) from None
    # Two methods run at a time: one receives while another sends.
    kind = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0), max_restarts=0, max_concurrency=2)(Node)
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in range(nodes)]
    actors = [kind.options(scheduling_strategy=place).remote(slots) for place in places]
    with contextlib.ExitStack() as carriers:
        wires = []
        for actor in actors:
            wire, carrier = connect(_ActorChannel(ray, actor))
            wires.append(wire)
            carriers.callback(carrier.close)
        try:
            yield wires
        finally:
            carriers.close()
            ended = [actor.end.remote() for actor in actors]
            ray.wait(ended, num_returns=len(ended), timeout=2 * _END_S)
            remove_placement_group(group)


class Node:
    """Runs as an actor on a node of the cluster. The host process is its child, because a worker of Ray has threads."""

    def __init__(self, slots: int) -> None:
        import ray

        self._wire, self._process = start_host(address=ray.util.get_node_ip_address(), slots=slots)

    def send(self, messages: list[Message]) -> None:
        for message in messages:
            self._wire.send(message)

    def receive(self, limit_s: float) -> list[Message]:
        try:
            return take(self._wire, limit_s=limit_s)
        except Closed:
            return [closing(f"its process {exit_words(self._process.wait())}")]

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_S)
        self._process.terminate()


class _ActorChannel:
    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def send(self, messages: list[Message]) -> None:
        self._call(self._actor.send, messages)

    def receive(self, *, limit_s: float) -> list[Message]:
        return list(self._call(self._actor.receive, limit_s))

    def _call(self, method: Any, argument: Any) -> Any:
        try:
            return self._ray.get(method.remote(argument))
        except self._ray.exceptions.RayError as error:
            raise Closed(f"Ray has lost its actor: {one_line(error)}") from None


if __name__ == "__main__":
    with visible_output():
        sys.exit(main(sys.argv[1:]))
