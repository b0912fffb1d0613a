"""Fuzzing: everything that reads what somebody wrote, in one table."""
