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
# # What others published, beside the law and the model
#
# Every published number that the lab has, and what the Burst-Gap law and the simulated device make
# of it. Choose a table: above, predictions against published values, and below them the error,
# predicted / published - 1 (a difference where zeros were published); then the rows, and what they
# say in words, also where they say no. Nothing is fitted to what it is compared with; what was
# taken from published numbers is named in each table.
#
# **Read second-hand:** everything *as reported by X-Stage* (arXiv 2607.23264 v1) was taken from
# public reading notes of the paper, not from the paper itself. No figure here was measured by this
# lab, and no SIMULATED one is a measurement.

# %%
from xstage_lab.lab import Paper

Paper("moe-stall")

# %% [markdown]
# ## Things to try
#
# - *moe-spans*: with tiles of 192 × 128, V/R less the compute time gives the reported stalls
#   without any reported span. The spans themselves do not come out.
# - *gemm-rs*: R from the shortest K alone; the order of the tiles explains half of the crossover.
# - *attention-simulated*: what the fused kernel adds to attention alone.
# - *wave-lag*: the store path explains little of what a lag gained on H100, with the dispatch on
#   the same egress or without it.
# - *grid*: the reported gain of interleaving over 84 layers is not reproduced;
#   *grid-assumptions* says what would move it.
#
# Tables of simulated runs take up to a minute when they are first chosen. The page stays usable,
# and what is shown until then is faded.

# %% [markdown]
# ## Issue is not completion
#
# One warp's messages to a peer, as stmoonar/tileccl timed them: with a system fence a message of
# 32 KiB takes several times as long as its stores take to issue. Choose *release* for the flag.

# %%
Paper("issue-completion")

# %% [markdown]
# ## In a script
#
# `python -m xstage_lab paper --json` prints every table; here is one.

# %%
from xstage_lab.paper import worked_out

worked_out("attention").summary
