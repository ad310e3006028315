"""FlashAttention for NVIDIA GPUs in CUTLASS/CuTe C++, with a PyTorch interface."""
