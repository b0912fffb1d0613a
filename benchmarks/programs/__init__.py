"""Programs, generations, ranks, operators and public scripts, predicted and run for real on the CPU."""
