"""What the tests draw from: machines, workloads, tunings and nonsense."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st

from xstage_lab.spec import BurstTrain, FusedGemm, LinkSpec, MachineSpec, Tuning

# Nothing here is a race: a slow machine must not fail a test.
settings.register_profile("lab", deadline=None, max_examples=60)
settings.load_profile("lab")

KIB, MIB = 1024, 2**20

# What no quantity may be.
JUNK = (math.nan, math.inf, -math.inf, -1, "many", "", None, True, [1], 10**30)


def machine_of(n_sms: int = 16, max_gpus: int = 8, *, topology: str = "switch",
               flop_per_s: float = 1e15, **link: float) -> MachineSpec:
    """Return a machine whose memory and caches never matter; `link` overrides its store path.

    100 GB/s out of every GPU into a path of 1 MiB, everything behind it out of the way.
    """
    fields = {
        "egress_bytes_per_s": 100e9,
        "ingress_bytes_per_s": 1e15,
        "per_sm_bytes_per_s": 20e9,
        "issue_latency_s": 0.0,
        "path_capacity_bytes": float(MIB),
        "per_sm_capacity_bytes": math.inf,
        "credit_bytes": 1e12,
        "credit_latency_s": 0.0,
    } | link
    return MachineSpec(name="test machine", n_sms=n_sms, max_gpus=max_gpus,
                       bf16_flop_per_s=flop_per_s, fp8_flop_per_s=2 * flop_per_s,
                       link=LinkSpec(name="test link", topology=topology, **fields))


def log_floats(low: float, high: float) -> st.SearchStrategy[float]:
    """Floats spread evenly over orders of magnitude."""
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@st.composite
def machines(draw: st.DrawFn, topology: str = "switch", max_sms: int = 24) -> MachineSpec:
    """Machines whose every bottleneck may bind: SMs, path, egress, ingress, credits."""
    egress = draw(log_floats(1e9, 1e12))
    latency = draw(st.sampled_from((0.0, 0.5e-6, 2e-6)))
    return machine_of(
        n_sms=draw(st.integers(1, max_sms)),
        topology=topology,
        flop_per_s=draw(log_floats(1e13, 1e15)),
        egress_bytes_per_s=egress,
        ingress_bytes_per_s=egress * draw(st.floats(0.5, 2.0)),
        per_sm_bytes_per_s=egress * draw(log_floats(0.02, 2.0)),
        issue_latency_s=draw(st.sampled_from((0.0, 0.2e-6))),
        path_capacity_bytes=draw(log_floats(16 * KIB, 4 * MIB)),
        per_sm_capacity_bytes=draw(log_floats(4 * KIB, 256 * KIB)),
        credit_bytes=draw(log_floats(64 * KIB, 4 * MIB)),
        credit_latency_s=latency,
    )


@st.composite
def burst_trains(draw: st.DrawFn, n_sms: int = 24, max_gpus: int = 8) -> BurstTrain:
    """Trains short enough to simulate in passing."""
    return BurstTrain(
        n_producers=draw(st.integers(1, n_sms)),
        burst_bytes=draw(st.integers(1, 128 * KIB)),
        gap_s=draw(st.sampled_from((0.0, 1e-7, 2e-6, 5e-5))),
        n_bursts=draw(st.integers(1, 10)),
        sync=draw(st.sampled_from(("free", "lockstep"))),
        n_gpus=draw(st.integers(1, max_gpus)),
    )


DESTINATIONS = st.one_of(
    st.sampled_from(("round-robin", "row-owner", "row-owner-unrotated")),
    st.sampled_from((0.0, 0.125, 0.4, 1.0)).map("hot:{}".format),
)


@st.composite
def gemms(draw: st.DrawFn, max_gpus: int = 8, max_edge: int = 1500) -> FusedGemm:
    """GEMMs of any shape, ragged edges included."""
    return FusedGemm(
        m=draw(st.integers(1, max_edge)),
        n=draw(st.integers(1, max_edge)),
        k=draw(st.integers(1, 4096)),
        n_gpus=draw(st.integers(1, max_gpus)),
        destinations=draw(DESTINATIONS),
        dtype=draw(st.sampled_from(("bf16", "fp8"))),
        out_dtype=draw(st.sampled_from(("bf16", "fp32"))),
    )


@st.composite
def tunings(draw: st.DrawFn, max_ctas: int | None = None) -> Tuning:
    """Tilings of any size and depth."""
    n_ctas = st.none() if max_ctas is None else st.one_of(st.none(), st.integers(1, max_ctas))
    return Tuning(
        tile_m=draw(st.integers(32, 300)),
        tile_n=draw(st.integers(32, 300)),
        issue_depth=draw(st.integers(1, 4)),
        n_ctas=draw(n_ctas),
    )
