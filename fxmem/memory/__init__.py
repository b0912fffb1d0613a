"""What follows from a `Profile` alone: live bytes, the allocator, budgets, modules, lines, layers. No torch."""
