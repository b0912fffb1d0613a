"""Keeps what a program writes, or would send, apart from all that is the user's."""
