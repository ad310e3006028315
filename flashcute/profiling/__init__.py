"""Profiles of a kernel: from its machine code alone, or from Nsight Compute's counters."""
