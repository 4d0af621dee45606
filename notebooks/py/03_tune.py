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
# # Which tile, which depth, and should I fuse?
#
# A persistent GEMM on every GPU stores each output tile to the GPU that owns it. Choose tile and
# staging; the panel says what binds (Tensor Core, issue, link, or what the path holds), by what
# margin, and whether fusing beats computing first and copying after.
#
# *Measure* runs the settings on a simulated node: first the tile with its stores off, for its
# compute time, then the fused kernel. *One SM* shows that run tile by tile, with the link's
# backlog below. *Sweep* runs a series and shows it under *Series*. *Tile × depth* marks what does
# not fit into shared memory; *Find the best* predicts all of it, measures the promising few, and
# ends with the controls on the fastest, the runner-up, and whether to fuse. Stopped, it goes on
# from the run log when pressed again.

# %%
from xstage_lab.lab import Tune

Tune(machine="B200-SXM", m=8192, n=8192, k=4096, tile_m=128, tile_n=128, issue_depth=2)

# %% [markdown]
# ## Things to try
#
# - Drag *issue depth* to 1: computing and issuing add up, although nothing is blocked.
# - Halve k again and again: below some k the link takes over, and no tile or depth brings the
#   time back. More bytes per FLOP, *fp32* output, does the same.
# - *row-owner-unrotated*: all GPUs store to the same owner at a time. Its ingress is shared by
#   all, and the kernel takes several times as long as the same bytes spread out.
# - 256 × 256 tiles: fewer operand bytes, but do the staging slots still fit?
# - *device: recorded* and a shape *GEMM + RS*: the fused kernel that others published, on eight
#   H100, beside a prediction that was not fitted to it.

# %% [markdown]
# ## A published kernel
#
# ParallelKittens' fused GEMM + reduce-scatter on eight H100. The figure *Published* takes R from
# the shortest K alone and predicts the other rows as max(T_gemm, V/R); the sum, which issue
# waiting for completion would give, is far off.

# %%
published = Tune(machine="H100-SXM", device="recorded", series="k", m=32768, n=32768, k=2048,
                 destinations="row-owner", tile_n=256)
published.visible = "Published"
published

# %% [markdown]
# Not modelled: the reduction at the owner, multicast and in-switch reduction, traffic both ways
# on one link, cross-node networks, and store warps beside memory-bound compute.
