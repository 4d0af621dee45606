"""xstage-lab: measure and predict post-issue backpressure of fused GPU kernels."""

__version__ = "0.1.0"
