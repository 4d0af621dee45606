"""A whole step of Ulysses attention: three all-to-alls in, the attention, one all-to-all out.

Compute and bytes of a GPU both shrink with the number of GPUs. What does not shrink decides where
more GPUs stop paying: partial waves of tiles, synchronisation, launches.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from xstage_lab.analysis.prediction import Prediction
from xstage_lab.errors import require_number
from xstage_lab.spec import DTYPE_BYTES, UlyssesAttention

N_INPUTS = 3  # queries, keys and values


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What a step costs beyond computing and bytes. All of it is ASSUMED.

    Attributes
    ----------
    sync_s : float
        Synchronisation of one all-to-all. The default is two flags between GPUs, one that the
        destination is free and one that the data are there, at the 1.25 us one way that were
        measured on NVLink and PCIe alike.
    per_peer_s : float
        What an all-to-all costs more for every further peer: messages of its own, no flags that
        travel together.
    launch_s : float
        From the end of a kernel to the start of the next in its stream.
    """

    sync_s: float = 2.5e-6
    per_peer_s: float = 0.0
    launch_s: float = 3e-6

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            require_number(field.name, getattr(self, field.name), low=0.0, high=1.0, unit="s")


class UlyssesStep(NamedTuple):
    """Times of one step (s).

    Attributes
    ----------
    input_s : the bytes of queries, keys and values
    attention_s : the attention alone
    output_s : what the output's stores add to it, in the mode predicted
    fixed_s : synchronisation and launches
    total_s : all of them
    unfused_s : the same with the output sent by a kernel of its own after the attention
    """

    input_s: float
    attention_s: float
    output_s: float
    fixed_s: float
    total_s: float
    unfused_s: float


def ulysses_step(attention: UlyssesAttention, prediction: Prediction,
                 costs: StepCosts | None = None) -> UlyssesStep:
    """Put the all-to-alls of the inputs and the fixed costs around a predicted attention.

    Inputs go at the rate that all SMs together can store; nothing hides them.
    """
    costs, peers = costs or StepCosts(), attention.n_gpus - 1
    rows = math.ceil(attention.sequence / attention.n_gpus)
    element = attention.head_dim * DTYPE_BYTES[attention.dtype]
    sent = rows * (attention.heads - attention.heads // attention.n_gpus) * element
    input_s = N_INPUTS * sent / prediction.terms["drain_bytes_per_s"]
    n_exchanges = N_INPUTS + 1 if peers else 0
    fixed = (n_exchanges * (costs.sync_s + peers * costs.per_peer_s)
             + max(n_exchanges, 1) * costs.launch_s)  # the output's goes with the attention
    alone, total = prediction.terms["compute_only_s"], prediction.summary["total_s"]
    apart = prediction.unfused["total_s"] + (costs.launch_s if peers else 0.0)
    return UlyssesStep(input_s, alone, total - alone, fixed, input_s + total + fixed,
                       input_s + apart + fixed)


def losing_per_peer_s(fewer: UlyssesStep, more: UlyssesStep, n_more_gpus: int) -> float:
    """Further cost per all-to-all and peer from which on `n_more_gpus` more GPUs lose (s)."""
    return (fewer.total_s - more.total_s) / ((N_INPUTS + 1) * n_more_gpus)
