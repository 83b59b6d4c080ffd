"""Kernels of our own, for what compilers and libraries do slowly with few channels; they need Triton and CUDA."""
