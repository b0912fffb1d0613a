"""A step of a model as `torch.compile` would run it on the target."""

from fxmem.simulation.recording.compiled.compiled_parts import Compile, parse_compile, read_compile

__all__ = ["Compile", "parse_compile", "read_compile"]
