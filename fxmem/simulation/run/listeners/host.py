"""What the host has after each round."""

from fxmem.simulation.run.listeners import register

register("host", lambda parts: parts.host)
