"""Where a node stands among the modules, and other words that several formats share."""

from __future__ import annotations

from itertools import accumulate

from fxmem.records.profile import Node, Profile, SourceLine, Storage
from fxmem.records.units import format_shape, to_words


def enclosing_modules(node: Node) -> tuple[str, ...]:
    """Paths of the modules around a node, outermost first, the model itself left out; a called module is not around its
    own call."""
    path = node.module.rpartition(".")[0] if node.op == "call_module" else node.module
    return tuple(accumulate(path.split("."), "{}.{}".format)) if path else ()


def module_label(profile: Profile, path: str) -> str:
    """Last segment of a module's path and its class: `layer1 (Sequential)`."""
    name = path.rpartition(".")[2]
    class_name = profile.modules.get(path, "")
    return f"{name} ({class_name})" if class_name else name


def storage_label(storage: Storage) -> str:
    """A storage in a few words: `gradient conv1.weight 64x3x7x7 float32`."""
    tensor = (format_shape(storage.shape), storage.dtype) if storage.dtype else ()
    return " ".join(part for part in (to_words(storage.kind), storage.title, *tensor) if part)


def site(source: SourceLine | None) -> str:
    """`file:line`, or nothing."""
    return "" if source is None else f"{source.file}:{source.line}"


def title(profile: Profile) -> str:
    """What was predicted, by what: the words that tell a prediction from a measurement."""
    step = "training step" if profile.step.mode == "train" else "inference"
    return f"PREDICTED {step} of {profile.model} for {profile.target.name}, by fxmem {profile.fxmem_version}"
