"""What this computer's GPUs and compilers allow to measure, and why not the rest."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from xstage_lab.devices import cuda_gpus
from xstage_lab.devices.cuda_gpus import GpuFacts
from xstage_lab.errors import DeviceUnavailable
from xstage_lab.kernels.host.build import gxx, run_gxx
from xstage_lab.kernels.nvrtc import nvrtc_version
from xstage_lab.record import to_plain
from xstage_lab.units import text

_MEANS = {
    "simulated": "times of a model", "sockets": "live, in socket buffers",
    "host": "results and races of the kernels, no times",
    "cuda": "live", "cuda:local": "live, the control", "cuda:host": "live, over the host link",
    "cuda:peer": "live, between GPUs",
}


class Gpus(NamedTuple):
    """What was found.

    Attributes
    ----------
    gpus : list of dict
        Facts of each GPU, with what nvidia-smi says of driver, clocks and PCIe.
    connections : list of dict
        Of each pair: `gpus`, `link` (NVLink, PCIe or empty) and `reason` why it is not used.
    tools : dict
        Versions of CUDA's driver and runtime, CuPy, NVRTC and g++, and the CUDA headers' folder;
        None where absent.
    measures : dict
        Device, `:`, destination -> why it cannot be used here; empty if it can.
    missing : str
        Why there is no GPU to use, and what to do; empty if there is one.
    """

    gpus: list[dict[str, Any]]
    connections: list[dict[str, Any]]
    tools: dict[str, str | None]
    measures: dict[str, str]
    missing: str


def cuda_measures() -> tuple[dict[str, str], list[GpuFacts]]:
    """Return why the live devices cannot be used here, empty where they can, and the GPUs."""
    measures = {"sockets": "" if os.name == "posix" else "this system has no Unix stream sockets."}
    try:
        cuda = cuda_gpus.load_cuda()
        facts = cuda_gpus.gpus(cuda)
        return measures | _with_gpus(facts, _connections(cuda, facts)), facts
    except (DeviceUnavailable, RuntimeError) as error:  # CUDA's errors are RuntimeErrors
        return measures | {"cuda": str(error)}, []


def look() -> Gpus:
    """Look at GPUs and compilers; never raises for what is missing, and creates no context."""
    tools: dict[str, str | None] = {
        "cuda_driver": None, "cuda_runtime": None, "cupy": None,
        "nvrtc": _or_none(nvrtc_version), "headers": _headers(), "g++": _or_none(_gxx_version)}
    measures = {
        "simulated": "" if _has("numba") else 'numba is not installed. Run: pip install "numba"',
        "sockets": "" if os.name == "posix" else "this system has no Unix stream sockets.",
        "host": _reason(gxx),
    }
    try:
        cuda = cuda_gpus.load_cuda()
        facts = cuda_gpus.gpus(cuda)
        tools |= {"cuda_driver": cuda_gpus.cuda_version(cuda.runtime.driverGetVersion()),
                  "cuda_runtime": cuda_gpus.cuda_version(cuda.runtime.runtimeGetVersion()),
                  "cupy": str(importlib.import_module("cupy").__version__)}
        connections = _connections(cuda, facts)
    except (DeviceUnavailable, RuntimeError) as error:  # CUDA's errors are RuntimeErrors
        measures["cuda"] = "there is no GPU to use."
        return Gpus([], [], tools, measures, str(error))
    measures |= _with_gpus(facts, connections)
    plain = [to_plain(each._asdict() | {"arch": each.arch} | cuda_gpus.driver_facts(each))
             for each in facts]
    return Gpus(plain, connections, tools, measures, "")


def lines(found: Gpus) -> list[str]:
    """Return what was found as text, a line for each GPU, pair and thing that can be measured."""
    told = [_told_gpu(gpu) for gpu in found.gpus] or ["GPUs: none"]
    told += [f"GPU {pair['gpus'][0]} and GPU {pair['gpus'][1]}: "
             + (pair["reason"] or pair["link"] or "connected") for pair in found.connections]
    told.append(", ".join(f"{name.replace('_', ' ')} {version or 'missing'}" for name, version in
                          found.tools.items()))
    can = [f"{name} ({_MEANS[name]})" for name, why in found.measures.items() if not why]
    told.append(f"can be measured here: {', '.join(can) or 'nothing'}")
    return told + [f"cannot: {name}: {why}" for name, why in found.measures.items() if why]


def _told_gpu(gpu: dict[str, Any]) -> str:
    facts = [
        f"GPU {gpu['number']}: {gpu['name']}, compute capability "
        f"{gpu['capability'][0]}.{gpu['capability'][1]}",
        f"{gpu['n_sms']} SMs up to {text('_hz', gpu['clock_hz'], 4)}",
        f"{gpu['memory_bytes'] / 2**30:.0f} GiB at "
        f"{text('_bytes_per_s', gpu['memory_bytes_per_s'])}",
        f"L2 {text('_bytes', gpu['l2_bytes'])}",
        f"{gpu['smem_per_cta_bytes'] / 1024:.0f} KiB of shared memory for a CTA, "
        f"{gpu['smem_per_sm_bytes'] / 1024:.0f} KiB an SM",
        "cooperative launches" if gpu["cooperative"] else "no cooperative launches"]
    if "driver_version" in gpu:
        facts += [f"driver {gpu['driver_version']}",
                  f"PCIe gen {gpu['pcie_link_gen_current']} x{gpu['pcie_link_width_current']}"]
    if gpu["exec_timeout"]:
        facts.append("ends kernels that take seconds, as it drives a display")
    return ", ".join(facts)


def _connections(cuda: Any, facts: list[GpuFacts]) -> list[dict[str, Any]]:
    found = []
    for i, one in enumerate(facts):
        for other in facts[i + 1:]:
            way = cuda_gpus.connection(cuda, one.number, other.number)
            found.append({"gpus": [one.number, other.number], "link": way.kind,
                          "reason": way.reason})
    return found


def _with_gpus(facts: list[GpuFacts], connections: list[dict[str, Any]]) -> dict[str, str]:
    """Return why each destination cannot be used, with at least one GPU."""
    first = facts[0]
    why = _reason(nvrtc_version)
    if not first.arch:
        major, minor = first.capability
        why = (f"{first.name} has compute capability {major}.{minor}; the kernels are made for "
               "8.x, 9.0 and 10.0.")
    host = why or ("" if first.maps_host else f"{first.name} does not map host memory.")
    peer = why
    if not why and not any(not pair["reason"] for pair in connections):
        peer = " ".join(pair["reason"] for pair in connections) or "there is one GPU only."
    return {"cuda:local": why, "cuda:host": host, "cuda:peer": peer}


def _headers() -> str | None:
    """Return where CUDA's headers are; our kernels need none, CuPy's own do."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return None
    return _or_none(lambda: find_nvidia_header_directory("cudart"))


def _gxx_version() -> str:
    return run_gxx("-dumpfullversion").stdout.strip()


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _or_none(ask: Callable[[], Any]) -> str | None:
    try:
        found = ask()
    except (DeviceUnavailable, ImportError, OSError, RuntimeError):
        return None
    return None if found is None else str(found)


def _reason(ask: Callable[[], object]) -> str:
    try:
        ask()
    except DeviceUnavailable as error:
        return str(error)
    return ""
