"""Processes of ours and the program's: forks, jobs, descendants, one at a time, and the sandbox."""
