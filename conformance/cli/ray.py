"""Ray: a run on several nodes of a Ray cluster, one agent on each (``pip install backend-parity[ray]``).

    python -m conformance.cli.ray --nodes 2 --slots 8 run --device cuda --profile full --out /shared/out

A placement group (STRICT_SPREAD) reserves on each node as many GPUs, or processors, as the agent offers slots. The
controller runs where this command is started, which has to be a machine of the cluster or one that it can reach.
"""

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from conformance.cli.main import main as parity
from conformance.core.errors import UsageError
from conformance.runtime.multihost.agent import free_port
from conformance.runtime.multihost.handshake import SECRET

_RESERVED_S = 300.0  # for the cluster to have the nodes free


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.cli.ray", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="how many nodes of the cluster take part")
    parser.add_argument("--slots", type=int, required=True, help="how many ranks each of them starts")
    parser.add_argument("--ranks-per-gpu", type=int, default=1, help="of parity run")
    parser.add_argument("command", choices=["run"], help="and the options of parity run")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of parity run")
    options, rest = parser.parse_known_args(arguments)
    try:
        import ray
    except ImportError:
        print("parity: ray is not installed; pip install 'backend-parity[ray]'", file=sys.stderr)
        return 2
    try:
        ray.init(address="auto", log_to_driver=True, configure_logging=False)
    except ConnectionError as error:
        print(f"parity: no Ray cluster is running here ({error}); start one with ray start --head", file=sys.stderr)
        return 2
    try:
        host = ray.util.get_node_ip_address()
        address, secret = f"{host}:{free_port(host)}", secrets.token_hex(32)
        os.environ[SECRET] = secret
        gpus = -(-options.slots // max(1, options.ranks_per_gpu)) if options.device == "cuda" else 0
        where = ["--device", options.device, "--ranks-per-gpu", str(options.ranks_per_gpu)]
        with _agents(ray, address, secret, nodes=options.nodes, slots=options.slots, gpus=gpus):
            return parity(["run", *rest, *where, "--hosts", str(options.nodes), "--listen", address])
    except UsageError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _agents(ray: Any, address: str, secret: str, *, nodes: int, slots: int, gpus: int) -> Iterator[None]:
    """Agents on ``nodes`` nodes, as tasks of Ray, in a placement group of their own. Raises UsageError."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": slots}
    group = placement_group([needs] * nodes, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=_RESERVED_S)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise UsageError(
            f"the Ray cluster has no {nodes} nodes with {needs} free (waited {_RESERVED_S:g} s); ray status shows what "
            f"there is, and --slots and --nodes say what is wanted"
        ) from None
    task = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0), max_retries=0)(run_agent)
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in range(nodes)]
    running = [task.options(scheduling_strategy=place).remote(address, secret, slots, sys.path) for place in places]
    try:
        yield
    finally:
        # The run has told the agents to end; one that never came is ended with the group.
        ray.wait(running, num_returns=len(running), timeout=10)
        remove_placement_group(group)


def run_agent(address: str, secret: str, slots: int, path: list[str]) -> int:
    """On a node of the cluster: an agent in a process of its own, because a worker of Ray has threads."""
    environment = {**os.environ, SECRET: secret, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-P", "-m", "conformance.cli.agent", address, "--slots", str(slots)]
    with subprocess.Popen(command, env=environment) as agent:
        try:
            return agent.wait()
        finally:
            agent.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
