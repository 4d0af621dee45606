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
# # In which order should a MoE layer's tiles run, and why?
#
# One persistent kernel on every GPU computes both expert layers; only Linear-2 stores to other
# GPUs. In *wave* order a group of experts runs its Linear-1 and then its Linear-2, so that the
# combine stores come in bursts. *Interleaved*, a row block's Linear-2 runs as soon as Linear-1 is
# far enough ahead: the same tiles and bytes, spread evenly, but each row block may find the other
# layer's weights in L2 in place of its own.
#
# *Measure* runs both orders on a simulated node; *Orders* then shows them on one time axis, with
# the link's backlog below each. *Sweep* runs both at several numbers of tokens.

# %%
from xstage_lab.lab import MoESchedule

MoESchedule(machine="B200-SXM", tokens=2048, wave_experts=16)

# %% [markdown]
# ## Things to try
#
# - Clear *experts per wave*, so that it is as small as keeps every SM busy: Q takes nearly all of
#   so short a burst, and the gain is gone. A burst of r rounds waits for r (V/R - T_mma) - Q/R.
# - *issue depth* 1: every tile now adds its issue time, and an order has less to save.
# - *minimum lead rows* 128, a single row block: Linear-2 waits for Linear-1 on every SM.
# - Model *DiT-MoE-XL*, 1024 tokens: no store waits, and yet waves are faster. The words say why.
# - Routing *zipf*: the busiest GPU sets the time, and no order changes that.
# - Model *GLM-5.2*, *bf16*, on *H100-SXM*: L2 holds the weights of one layer of an expert, not of
#   both. Interleaved, every row block fetches them again; X-Stage saw 0.94 times the speed so.
# - *Map*: the rule in closed form over published models, beside what others measured.

# %% [markdown]
# ## A published kernel in two orders
#
# DeepGEMM's PR 88 timed one FP8 kernel on eight H100 in both orders. *Sweep* replays it beside the
# prediction. The store path alone explains little of the 1.07 to 1.45 measured: its author's
# reading is that in waves the combine starts while the dispatch still uses the same egress, which
# is not in this model; `python -m xstage_lab paper --table wave-lag` tests that reading.

# %%
published = MoESchedule(machine="H100-SXM", device="recorded", tokens=2048, hidden=4096,
                        intermediate=2048, experts=288, top_k=8)
published.visible = "Speed-up"
published

# %% [markdown]
# ## Your own routing
#
# Rows of each expert, as a router counted them; they add up to tokens × GPUs × top k.

# %%
rows = [960, 64] * 32
MoESchedule(tokens=1024, hidden=4096, intermediate=1536, experts=64, top_k=4, rows=rows,
            routing="given")

# %% [markdown]
# Not modelled: the dispatch and what it shares with the combine, reductions at the owner, the
# activation between the layers, tiles handed out on demand (tile i runs on SM i mod K here), and
# more than one owner per tile: its tokens live on all GPUs.
