"""A kernel of our own, for what libraries do slowly with few channels, and who chooses it; for Triton and CUDA."""
