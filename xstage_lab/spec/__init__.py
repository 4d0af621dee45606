"""What is studied: links, machines, workloads and tunings, as frozen, validated dataclasses.

Everything is SI. NaN in a machine or link means *not known*; `assumed` names the fields whose
value nobody measured and somebody had to suppose.
"""

from xstage_lab.spec.attention import UlyssesAttention
from xstage_lab.spec.machine import MAX_GPUS, TOPOLOGIES, LinkSpec, MachineSpec
from xstage_lab.spec.moe import MoELayer
from xstage_lab.spec.tuning import Tuning, Workload, check_feasible, default_tuning, smem_bytes
from xstage_lab.spec.workloads import DESTINATIONS, DTYPE_BYTES, SYNCS, BurstTrain, FusedGemm

__all__ = [
    "DESTINATIONS",
    "DTYPE_BYTES",
    "MAX_GPUS",
    "SYNCS",
    "TOPOLOGIES",
    "BurstTrain",
    "FusedGemm",
    "LinkSpec",
    "MachineSpec",
    "MoELayer",
    "Tuning",
    "UlyssesAttention",
    "Workload",
    "check_feasible",
    "default_tuning",
    "smem_bytes",
]
