"""What a kernel costs and why: from its machine code alone, or from Nsight Compute's counters."""
