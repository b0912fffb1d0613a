"""Which kernels the card would run where fakes run others."""
