"""CUDA kernels, and what compiles and runs them."""
