"""A whole run of a program: growth, the host's memory, evaluations, lengths, schedules, rollouts."""
