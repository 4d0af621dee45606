# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py//py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How much of Ulysses' all-to-all can attention hide?
#
# Every GPU computes some heads over the whole sequence, and stores each output tile to the GPU that
# owns its rows. A tile's loop over the keys is the gap that the path drains in. Choose who sends:
# the role that owns the tile (*fused*), SMs that do nothing else (*dedicated*), or all SMs after the
# attention (*serial*). The hidden share is (serial - fused)/(serial - attention alone).
#
# *Measure* runs these settings on a simulated node, and once each what they are compared with:
# tiles with their stores off, the attention alone, and the all-to-all after it. *Sweep* varies what
# the visible figure has on its axis; *One SM* shows the last run.

# %%
from xstage_lab.lab import Ulysses

Ulysses(machine="B200-SXM", sequence=32760, heads=40, head_dim=128, n_gpus=8, mode="fused")

# %% [markdown]
# ## Things to try
#
# - *Sequence*: attention grows with the square of the tokens and the all-to-all with their number.
#   From what length on is all of it hidden?
# - *dedicated*: what SMs that only send are worth, they no longer compute.
# - *causal*: the SM with the longest tiles ends last, long after the others' stores have left.
# - Model *Z-Image*: 30 heads on 8 GPUs are impossible, and *GPUs* says where they are not.

# %% [markdown]
# ## Where more GPUs stop paying
#
# FLUX.1 at 1024 × 1024 has 24 heads and 4608 tokens. Others report that overlapping the all-to-all
# gains on 2 and 4 B200 and loses on 8 (TensorRT-LLM pull request 16737), and, on a machine not
# named, 8 GPUs slower than one (xDiT issue 553).
#
# On 8 GPUs each has 120 tiles for 148 SMs: one wave, and all of it is stored at its end. Less than
# a third of the all-to-all is hidden, where 4 GPUs hide four fifths, and fusing gains less than half
# as much. But with nothing fitted the step itself is still faster on 8 GPUs than on 4. A fixed cost
# that all all-to-alls have in common does not change that; one that grows with the number of peers
# does, from 2 us a peer on. NCCL's small all-to-alls took 9 us more for each GPU from 4 to 8 B200
# (TensorRT-LLM pull request 15285). Raise *more per peer* until the curve turns.

# %%
flux = Ulysses(machine="B200-SXM", sequence=4608, heads=24, head_dim=128, n_gpus=8)
flux.visible = "GPUs"
flux

# %% [markdown]
# Not modelled: the softmax between the two matrix products and its exponentials, the projections
# before and after, inputs that overlap with them, GPUs that wait for the slowest, cross-node
# networks. Flags take 1.2 to 1.3 us one way; what a library's all-to-all costs beyond its bytes is
# ASSUMED, and yours to enter.
