"""The card of a program: its memory, the border to it, its thread, and what the host holds."""
