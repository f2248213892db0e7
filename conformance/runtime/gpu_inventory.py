"""Lists the GPUs that this process may use, by UUID, and puts several ranks on one GPU.

A number of a GPU means nothing to other processes: GPU 0 of a job with ``CUDA_VISIBLE_DEVICES=2,3`` is GPU 2 of another
job. So GPUs are leased by UUID, and ranks get UUIDs. A number in the variable counts the GPUs in NVML's order, which is
the order of nvidia-smi, as torch assumes.

A share is the slot of one rank on a GPU that several ranks use. It has a name, ``GPU-0aa1#0``, so it is leased like a
GPU. With N ranks per GPU, every GPU has N shares. They are ordered round by round (the first share of every GPU, then
the second ones), so that ranks of a worker group share a GPU only if the group has more ranks than there are GPUs, and
rank N of a whole block has GPU N modulo the number of GPUs, which libraries assume (DTensor's random generators, the
first barrier of a process group).

NCCL refuses two ranks of a communicator on one GPU of a host ("Duplicate GPU detected" in src/init.cc of NVIDIA/nccl).
It takes ``NCCL_HOSTID`` as the name of the host (getHostHash in src/misc/utils.cc), so ranks that share GPUs get a host
name for each round of shares. It names a GPU, too, so that no two hosts have the same. NCCL then sends data between
rounds over its network, and within a round, whose ranks are on different GPUs, as between GPUs of a host.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.runtime.forkserver import NETWORK
from conformance.runtime.worker_groups import Block, Slot

VISIBLE = "CUDA_VISIBLE_DEVICES"
SAMPLED_S = 1.0
LIMIT_S = 10.0  # for NVML, which hangs where a driver does


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Describes a whole GPU. parts: UUIDs of its MIG devices. memory: used and total bytes, and capability: CUDA's
    compute capability; None if unknown to NVML."""

    uuid: str
    name: str = ""
    driver: str = ""
    parts: tuple[str, ...] = ()
    memory: tuple[int, int] | None = None
    capability: tuple[int, int] | None = None


def installed_gpus() -> list[Gpu]:
    """Returns all GPUs of this host in NVML's order; none without a driver, or if it does not answer in LIMIT_S."""
    answers = queue.SimpleQueue[list[Gpu]]()
    threading.Thread(target=lambda: answers.put(_query_nvml()), daemon=True).start()
    try:
        return answers.get(timeout=LIMIT_S)
    except queue.Empty:
        return []


def _query_nvml() -> list[Gpu]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [
            Gpu(
                uuid=pynvml.nvmlDeviceGetUUID(handle),
                name=pynvml.nvmlDeviceGetName(handle),
                driver=driver,
                parts=_parts(handle),
                memory=_memory(handle),
                capability=_capability(handle),
            )
            for handle in handles
        ]
    except pynvml.NVMLError:  # a GPU that fell off the bus
        return []
    finally:
        pynvml.nvmlShutdown()


def _parts(handle: object) -> tuple[str, ...]:
    import pynvml

    found = []
    with contextlib.suppress(pynvml.NVMLError):  # a GPU that cannot be divided
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(pynvml.NVMLError):  # no part has this number
                found.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
    return tuple(found)


def _capability(handle: object) -> tuple[int, int] | None:
    import pynvml

    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None
    return int(major), int(minor)


def _memory(handle: object) -> tuple[int, int] | None:
    import pynvml

    try:
        # The second version of the structure leaves out what the driver reserves, as nvidia-smi does.
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        return None
    return int(memory.used), int(memory.total)


def memory_of_gpus() -> dict[str, tuple[int, int]]:
    """Maps the UUID of each whole GPU to its used and total bytes, where NVML reports them."""
    return {gpu.uuid: gpu.memory for gpu in installed_gpus() if gpu.memory is not None}


def gpus_of_host() -> tuple[str, ...]:
    """Returns the UUIDs of the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves.

    Raises UsageError if the variable names a GPU that is not there: CUDA would silently hide this GPU and all after it.
    """
    return visible_gpus(installed_gpus(), os.environ.get(VISIBLE))


def visible_gpus(installed: Sequence[Gpu], visible: str | None) -> tuple[str, ...]:
    """Selects those of the ``installed`` GPUs that the value of ``CUDA_VISIBLE_DEVICES`` names."""
    if visible is None:
        return tuple(gpu.uuid for gpu in installed)
    chosen = [_named(entry.strip(), installed) for entry in visible.split(",") if entry.strip()]
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"{VISIBLE}={shown(visible)} names a GPU twice; name each once")
    return tuple(chosen)


def _named(entry: str, installed: Sequence[Gpu]) -> str:
    """Returns the UUID of an entry: a number, a UUID, or the beginning of one."""
    if entry.isdecimal():
        found = [gpu.uuid for gpu in installed[int(entry) : int(entry) + 1]]
    else:
        uuids = (uuid for gpu in installed for uuid in (gpu.uuid, *gpu.parts))
        found = [uuid for uuid in uuids if uuid.startswith(entry)]
    if len(found) != 1:
        count = f"{len(installed)} GPU{'s' * (len(installed) != 1)}"
        problem = f"{len(found)} GPUs" if found else f"not a GPU of this host, which has {count}"
        raise UsageError(f"{VISIBLE}: {shown(entry)} is {problem}; name GPUs by number or UUID (nvidia-smi -L)")
    return found[0]


def shares_of(gpus: Sequence[str], ranks_per_gpu: int) -> Block:
    """Returns the slots of ``ranks_per_gpu`` ranks on each GPU: the GPUs themselves for one rank."""
    if ranks_per_gpu == 1:
        return tuple(gpus)
    return tuple(f"{gpu}#{number}" for number in range(ranks_per_gpu) for gpu in gpus)


def gpu_of(slot: str) -> str:
    """Returns the GPU of a share, and any other slot unchanged."""
    gpu, _, number = slot.rpartition("#")
    return gpu if gpu and number.isdecimal() else slot


def gpus_of(block: Block) -> Block:
    """Returns the GPUs of a block, each once."""
    return tuple(dict.fromkeys(map(gpu_of, block)))


def more_shares(ranks: int, gpus: int) -> str:
    """Advises the user how ``ranks`` ranks fit on ``gpus`` GPUs."""
    each = -(-ranks // gpus)
    return f"--ranks-per-gpu {each} lets {each} ranks share a GPU"


def visible_to(block: Block) -> dict[str, str]:
    """Returns the environment variables that show ranks only the GPUs of their slots; none for an empty block."""
    return {VISIBLE: ",".join(gpus_of(block))} if block else {}


def network_of(block: Block) -> dict[str, str]:
    """Returns NCCL's network for ranks that share GPUs of this host, unless they have another one (forkserver)."""
    return NETWORK if len(gpus_of(block)) < len(block) else {}


def slots_of(block: Block) -> tuple[Slot, ...]:
    """Returns for each rank the index of its GPU among those of ``visible_to``, and its host name for NCCL."""
    gpus = gpus_of(block)
    is_shared = len(gpus) < len(block)
    hosts = [f"{gpus[0]}#{slot.rpartition('#')[2]}" if is_shared else "" for slot in block]
    return tuple(Slot(gpu=gpus.index(gpu_of(slot)), host=host) for slot, host in zip(block, hosts, strict=True))


class ActivityMeter:
    """Measures how busy GPUs are, by NVML, in a thread that ends with the process.

    With GPM (Hopper and later) the share of the multiprocessors that work; else the share of the time in which any
    kernel runs, which is named so.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._shares: dict[str, list[float]] = {}
        if gpus:
            threading.Thread(target=self._measure, args=(gpus_of(tuple(gpus)),), daemon=True, name="gpu meter").start()

    def shares(self) -> dict[str, float]:
        """Returns the mean share by GPU so far; empty if NVML measures none."""
        return {name: round(sum(shares) / len(shares), 4) for name, shares in list(self._shares.items())}

    def _measure(self, gpus: Sequence[str]) -> None:
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            handles = {gpu: pynvml.nvmlDeviceGetHandleByUUID(gpu) for gpu in gpus}
            samples = {gpu: _gpm_sample(handle) for gpu, handle in handles.items()}
            while True:
                time.sleep(SAMPLED_S)
                for gpu, handle in handles.items():
                    if (before := samples[gpu]) is None:
                        share, name = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu, f"{gpu} kernels"
                    else:
                        samples[gpu] = _gpm_sample(handle)
                        share, name = _between(before, samples[gpu]), gpu
                        pynvml.nvmlGpmSampleFree(before)
                    self._shares.setdefault(name, []).append(share / 100)


def _gpm_sample(handle: object) -> Any:
    """Returns a sample of the counters of a GPU; None if it has none, or this user may not read them."""
    import pynvml

    try:
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return None
        sample = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(handle, sample)
    except pynvml.NVMLError:
        return None
    return sample


def _between(before: Any, after: Any) -> float:
    """Returns the percentage of multiprocessors that worked between two samples."""
    import pynvml

    query = pynvml.c_nvmlGpmMetricsGet_t()
    query.version, query.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 1
    query.sample1, query.sample2 = before, after
    query.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
    pynvml.nvmlGpmMetricsGet(query)
    return float(query.metrics[0].value)
