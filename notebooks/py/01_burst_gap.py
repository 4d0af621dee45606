# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py//py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # When does a posted store push back?
#
# The epilogue of a fused kernel writes its tile to another GPU with ordinary stores and goes on
# as soon as they are *accepted*; the bytes travel on by themselves. That overlap is free, until
# stores come faster than the path drains for longer than it can hold them. From then on the
# store itself gets slower, the staging slots stay full and the Tensor Core waits.
#
# K producers issue bursts of B bytes each, V = K B, with a gap G of other work between two. Drag
# the gap and watch where the issue time leaves its floor. *Measure* runs the settings on a
# simulated node, *Sweep* whatever the visible figure has on its horizontal axis.

# %%
from xstage_lab.lab import BurstGap, Calculator

BurstGap(machine="B200-SXM", n_producers=148, burst_bytes=32 * 1024, gap_s=3e-6)

# %% [markdown]
# ## Am I blocked, and by how much?
#
# The same law, turned to the question of a tile loop: your T_mma, what a tile stores to others,
# your SMs, your link.

# %%
Calculator(t_mma_s=5e-6, tile_bytes=32 * 1024, n_sms=148)

# %% [markdown]
# ## The law
#
# Three parameters, calibrated once per device, and no refit: the issue time without backpressure
# T_iss0 = t0 + B / r_SM, the drain rate R, and the bytes Q that the path holds.
#
# - steady period $T = \max(T_\mathrm{iss0} + G,\; V/R)$, and issue time $T - G$
# - recovery gap, from which on nothing is blocked: $G^* = (V/R - T_\mathrm{iss0})^+$
# - backlog after a free burst: $q = (V - R\,T_\mathrm{iss0})^+$
# - one burst alone: $\max(T_\mathrm{iss0},\; (V - Q)/R)$, with its knee at $q = Q$
# - free of backpressure if and only if $V \le R\,(T_\mathrm{iss0} + G)$ and $q \le Q$
#
# While the link is the bottleneck the period is V/R whatever the schedule does; scheduling only
# decides how much of it is useful work. Had issue to wait for completion, the period would be
# G + V/R: measurements refute that, and so does the figure *Period*.
#
# The law is X-Stage's Burst-Gap law (arXiv 2607.23264 v1, read through public notes). Producers
# in lockstep, with a barrier between bursts, are an extension made here: in a gap no more than Q
# can drain, so that a long gap leaves the path idle.

# %% [markdown]
# ## The same without sliders
#
# A workload becomes a tile program, a device runs it and returns a record, and the law, which
# knows nothing of the device's mechanisms, is set beside it.

# %%
from xstage_lab import analysis, catalog
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.experiment import run
from xstage_lab.schedule import build
from xstage_lab.spec import BurstTrain

machine = catalog.with_assumptions(catalog.machine("B200-SXM"))
train = BurstTrain(n_producers=148, burst_bytes=32 * 1024, gap_s=1e-6, sync="lockstep")

# %%
(record,) = run(SimulatedDevice(machine), [build(train, machine)])
prediction = analysis.predict(train, machine, analysis.published(machine))
comparison = analysis.compare(prediction, record)
comparison.explain

# %%
comparison.error_ratio

# %% [markdown]
# ## What others measured
#
# Nobody fitted these to the law. The figure *Rate* of the panel sets published rates
# against the number of SMs beside min(K r_SM, R), with r_SM from the fewest SMs and R from the
# most, for every machine that has them. *Completion* has published times of one warp's
# messages: past a few KiB, waiting for arrival costs several times what issuing does.

# %%
published = BurstGap(machine="H20", n_producers=78, burst_bytes=16 * 1024, gap_s=1e-6)
published.visible = "Rate"
published

# %% [markdown]
# ## What is not modelled
#
# - reductions at the owner of a tile, multicast and reduction in the switch
# - traffic both ways on one link, unless it was measured so
# - networks between nodes
# - store warps that compete with memory-bound compute for the same memory: neighbours that only
#   use the Tensor Cores slow down by half a percent at most, memory-bound ones up to threefold
#
# Q, t0 and r_SM are published for few machines. Where they are not, the panel takes ASSUMED
# values, says so, and draws a band where the answer depends on them.
