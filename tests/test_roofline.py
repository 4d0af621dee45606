"""The compute time that the law takes where nobody has measured one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import MIB, machine_of

from xstage_lab.analysis import measure_t_mma, t_mma_roofline
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.spec import FusedGemm, Tuning

NODE = machine_of(32, flop_per_s=100e12, per_sm_bytes_per_s=9e9, issue_latency_s=0.2e-6)
TILES = st.sampled_from((64, 96, 128, 160, 256))


def both(gemm: FusedGemm, tuning: Tuning) -> tuple[float, float]:
    """Return the compute time of a tile as measured with stores off, and as by the roofline."""
    machine = dataclasses.replace(NODE, n_sms=tuning.n_ctas or NODE.n_sms)
    return (measure_t_mma(SimulatedDevice(NODE), gemm, tuning),
            float(t_mma_roofline(gemm, NODE, tuning.tile_m, tuning.tile_n, machine.n_sms)))


@given(st.integers(64, 4096), st.integers(64, 4096), TILES, TILES, st.sampled_from((7, 31, 32)))
def test_the_roofline_is_the_busiest_sm(m: int, n: int, tile_m: int, tile_n: int, k: int) -> None:
    """Edge tiles compute less: the roofline is never below what the busiest SM needs, and never
    above full tiles all along."""
    gemm = FusedGemm(m=m, n=n, k=1024, n_gpus=1)
    measured, roofline = both(gemm, Tuning(tile_m=tile_m, tile_n=tile_n, n_ctas=k))
    full = 2 * min(tile_m, m) * min(tile_n, n) * gemm.k / (100e12 / 32)
    assert measured <= roofline * (1 + 1e-9)
    assert roofline <= full * (1 + 1e-9)


def test_edge_tiles_hardly_widen_the_roofline() -> None:
    """Over drawn shapes the roofline is what is measured, but for a few where edges fall badly."""
    rng = np.random.default_rng(0)
    error = []
    for _ in range(60):
        m, n = (int(size) for size in rng.integers(500, 5000, 2))
        tile_m, tile_n = (int(size) for size in rng.choice((64, 96, 128, 160, 256), 2))
        measured, roofline = both(FusedGemm(m=m, n=n, k=1024, n_gpus=1),
                                  Tuning(tile_m=tile_m, tile_n=tile_n, n_ctas=31))
        error.append(roofline / measured - 1)
    assert np.median(error) < 1e-9
    assert np.quantile(error, 0.9) < 0.03


@pytest.mark.parametrize(("k", "streams"), [(2048, False), (8192, True)])
def test_weights_beyond_l2_stream_from_memory(k: int, streams: bool) -> None:
    """Where all weights fit into L2 only the FLOP rate counts; else each row of tiles waits for
    them, as on the simulated device."""
    machine = dataclasses.replace(NODE, l2_bytes=12 * MIB, hbm_bytes_per_s=1e12)
    gemm = FusedGemm(m=4096, n=2048, k=k, n_gpus=1)
    tuning = Tuning(tile_m=64, tile_n=64)
    by_flop = float(t_mma_roofline(gemm, NODE, 64, 64))
    roofline = float(t_mma_roofline(gemm, machine, 64, 64))
    assert (roofline > 1.2 * by_flop) == streams
    if streams:
        measured = measure_t_mma(SimulatedDevice(machine), gemm, tuning)
        assert roofline == pytest.approx(measured, rel=0.02)
