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
# # Which three numbers describe my store path, and can I trust them?
#
# The law needs the backpressure-free issue time $T_{iss0} = t_0 + B / r_{SM}$, the drain rate R and
# the outstanding capacity Q. Four experiments with bursts measure them on any device; nothing of
# the workloads they will predict enters.
#
# 1. *Zero-gap trains* keep the path full: the rate at which stores are accepted is the rate at
#    which they drain. Different splits of the same volume into producers and bytes must agree.
# 2. *Isolated bursts* of growing volume find an empty path. Past the knee, what was stored less
#    what drained meanwhile is what the path holds.
# 3. *Large gaps* let every burst find an empty path: issue time against size gives $t_0$ and
#    $r_{SM}$.
# 4. The same with *local stores* is the control: it must not care about the gap.

# %%
from xstage_lab.lab import Calibrate

Calibrate(machine="B200-SXM", repeats=3)

# %% [markdown]
# The device *sockets* does the same live on this computer: producer processes, socket buffers and
# a paced receiver. Its numbers are real, and noisy: look at the intervals.
#
# What a calibration cannot tell: a drain rate that the producers never reach is only a lower
# bound, and then Q cannot be seen at all. Buffers at a destination that drains slower than the
# link count into Q only once they have had time to fill. Producers that start late or early move Q
# by what the path drains meanwhile.
#
# *Save* keeps a calibration as a file; `--calibration FILE` on the command line predicts from it,
# and refuses it for another machine.
