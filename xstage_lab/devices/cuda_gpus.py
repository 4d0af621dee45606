"""The NVIDIA GPUs of this computer: what they are, and how they are connected.

Looking creates no CUDA context. CuPy is used through its thin wrappers of the CUDA runtime alone.
Not yet run on a GPU.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

from xstage_lab.errors import DeviceUnavailable
from xstage_lab.spec import LinkSpec, MachineSpec

INSTALL = 'On a machine with NVIDIA GPUs run, in the checkout: pip install --editable ".[gpu]"'
LOOK_AT_DRIVER = "If there should be one, look at what nvidia-smi says about the driver."
#: What the kernels are compiled for, by compute capability; within 8.x code runs on later ones.
ARCHITECTURES = {(8, None): "sm_80", (9, 0): "sm_90a", (10, 0): "sm_100a"}
#: GPUs whose memory host memory, or the GPU's own, may stand for: the kernels take eight.
STAND_INS = 8
#: Dense bf16 FLOP of one SM in a cycle, the vendor's figures, where the kernels run.
_FLOP_PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192}
# cudaDeviceAttr of the CUDA runtime.
_ATTRIBUTES = {
    "clock_khz": 13, "n_sms": 16, "exec_timeout": 17, "maps_host": 19, "memory_clock_khz": 36,
    "memory_bus_bits": 37, "l2_bytes": 38, "unified_addressing": 41, "major": 75, "minor": 76,
    "smem_per_sm_bytes": 81, "cooperative": 95, "smem_per_cta_bytes": 97,
}
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "persistence_mode",
               "pcie.link.gen.current", "pcie.link.width.current")


class GpuFacts(NamedTuple):
    """What the CUDA runtime says of a GPU; NaN is not known.

    Attributes
    ----------
    number : int
        For the CUDA runtime, from 0.
    name, bus_id : str
    capability : (int, int)
        Compute capability.
    n_sms : int
    clock_hz : float
        The highest the SMs run at.
    smem_per_cta_bytes, smem_per_sm_bytes, l2_bytes, memory_bytes : int
    memory_bytes_per_s : float
        Of the GPU's own memory, by its clock and bus.
    cooperative, maps_host, exec_timeout : bool
        Whether it launches cooperatively, maps host memory, and ends kernels that take long.
    """

    number: int
    name: str
    bus_id: str
    capability: tuple[int, int]
    n_sms: int
    clock_hz: float
    smem_per_cta_bytes: int
    smem_per_sm_bytes: int
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_s: float
    cooperative: bool
    maps_host: bool
    exec_timeout: bool

    @property
    def arch(self) -> str:
        """What kernels are compiled for; empty if there are no kernels for it."""
        return ARCHITECTURES.get(self.capability, ARCHITECTURES.get((self.capability[0], None), ""))

    @property
    def has_bulk(self) -> bool:
        """Whether it copies in bulk from shared memory."""
        return self.capability[0] >= 9


class Connection(NamedTuple):
    """How a GPU reaches another's memory.

    Attributes
    ----------
    kind : str
        `NVLink`, `PCIe`, or empty.
    reason : str
        Why the kernels cannot use it; empty if they can.
    """

    kind: str
    reason: str


def load_cuda() -> Any:
    """Return `cupy.cuda`, with at least one GPU.

    Raises
    ------
    DeviceUnavailable
        If CuPy, the driver or a GPU is missing; says which and what to do.
    """
    try:
        import cupy
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceUnavailable(f"No GPU is used: CuPy cannot be imported "
                                f"({first_line(error)}). {INSTALL}") from None
    try:
        n_gpus = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:  # every error of the CUDA runtime is one
        raise DeviceUnavailable(f"No GPU is used: CuPy finds none ({first_line(error)}). "
                                f"{LOOK_AT_DRIVER}") from None
    if not n_gpus:
        raise DeviceUnavailable("No GPU is used: the driver shows none. Look at nvidia-smi and at "
                                "the environment variable CUDA_VISIBLE_DEVICES.")
    return cupy.cuda


def missing() -> str:
    """Return why there is no GPU to use, and what to do; empty if there is one."""
    try:
        load_cuda()
    except DeviceUnavailable as error:
        return str(error)
    return ""


def gpus(cuda: Any) -> list[GpuFacts]:
    """Return the facts of every GPU that CUDA shows."""
    return [_facts(cuda.runtime, i) for i in range(cuda.runtime.getDeviceCount())]


def _facts(runtime: Any, number: int) -> GpuFacts:
    found = {name: int(runtime.deviceGetAttribute(attribute, number))
             for name, attribute in _ATTRIBUTES.items()}
    properties = runtime.getDeviceProperties(number)
    clock, bus = found["memory_clock_khz"] * 1e3, found["memory_bus_bits"] / 8
    return GpuFacts(
        number=number, name=_text(properties["name"]).removeprefix("NVIDIA "),
        bus_id=str(runtime.deviceGetPCIBusId(number)),
        capability=(found["major"], found["minor"]), n_sms=found["n_sms"],
        clock_hz=found["clock_khz"] * 1e3 or math.nan,
        smem_per_cta_bytes=found["smem_per_cta_bytes"],
        smem_per_sm_bytes=found["smem_per_sm_bytes"], l2_bytes=found["l2_bytes"],
        memory_bytes=int(properties["totalGlobalMem"]),
        memory_bytes_per_s=2.0 * clock * bus or math.nan,  # two transfers in a cycle
        cooperative=bool(found["cooperative"]),
        maps_host=bool(found["maps_host"] and found["unified_addressing"]),
        exec_timeout=bool(found["exec_timeout"]))


def connection(cuda: Any, source: int, destination: int) -> Connection:
    """Return how GPU `source` reaches the memory of GPU `destination`."""
    pair = f"GPU {source} and GPU {destination}"
    reaches = all(cuda.runtime.deviceCanAccessPeer(*way) for way in
                  ((source, destination), (destination, source)))
    if not reaches:
        return Connection("", f"{pair} have no path to each other's memory: another board without "
                          "NVLink between, a driver without peer access, or an IOMMU between "
                          "them (nvidia-smi topo -p2p r tells). Take the host link instead, or "
                          "the simulated device.")
    atomics = _p2p_attribute(_NATIVE_ATOMICS, source, destination)
    if atomics == 0:
        return Connection("PCIe", f"{pair} are connected by PCIe, which carries no atomic "
                          "operations, and GPUs that start together and raise each other's flags "
                          "need them. Take the host link instead.")
    return Connection("NVLink" if atomics == 1 else "", "")


def _p2p_attribute(attribute: int, source: int, destination: int) -> int | None:
    """Ask the driver itself, as CuPy does not; None if it does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    value = ctypes.c_int(-1)
    status = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, source, destination)
    return None if status else value.value


def driver_facts(gpu: GpuFacts) -> dict[str, str]:
    """Return what nvidia-smi says of driver, clocks and PCIe link; empty where it is not there."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader",
               "-i", gpu.bus_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20.0)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    if len(values) != len(_SMI_FIELDS):
        return {}
    return dict(zip((name.replace(".", "_") for name in _SMI_FIELDS), values, strict=True))


def cuda_version(number: int) -> str:
    """Return a version of CUDA as people write it: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def machine_of(facts: Sequence[GpuFacts], destination: str) -> MachineSpec:
    """Return this computer as a machine of equal GPUs that store to a destination.

    Parameters
    ----------
    facts : sequence of GpuFacts
        The GPUs that take part; for `host` and `local` the first stands for all.
    destination : str
        `peer`, `host` or `local`.

    Returns
    -------
    MachineSpec
        Nothing is known of its store path before it is calibrated.
    """
    gpu, n_gpus = facts[0], len(facts)
    names = {"peer": f"{n_gpus} x {gpu.name}", "host": f"{gpu.name} to host memory",
             "local": f"{gpu.name} to its own memory"}
    links = {"peer": LinkSpec(name="peer memory"),
             "host": LinkSpec(name="host memory", topology="host bridge"),
             "local": LinkSpec(name="own memory", topology="host bridge")}
    flop = _FLOP_PER_CYCLE.get(gpu.capability, math.nan) * gpu.n_sms * gpu.clock_hz
    return MachineSpec(
        name=f"{names[destination]} (this computer)", n_sms=gpu.n_sms,
        max_gpus=n_gpus if destination == "peer" else STAND_INS, clock_hz=gpu.clock_hz,
        smem_per_cta_bytes=float(gpu.smem_per_cta_bytes), bf16_flop_per_s=flop,
        hbm_bytes_per_s=gpu.memory_bytes_per_s, l2_bytes=float(gpu.l2_bytes) or math.nan,
        link=links[destination], assumed=frozenset({"bf16_flop_per_s"} if flop == flop else ()),
        source="the CUDA runtime; the FLOP rate is the vendor's for its kind of SM")


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its kind where it says nothing."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
