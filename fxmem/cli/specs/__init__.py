"""From a model spec on a command line to a `torch.nn.Module`, its weights never allocated.

    torchvision:NAME          a torchvision model
    timm:NAME                 a timm model
    hf:ORG/NAME               a model of the Hugging Face hub, from the local cache or a shipped table
    hf:CLASS                  a transformers model class with its config's defaults
    hf:path/to/config.json    the class a config names in `architectures`
    pkg.mod:NAME, file.py:NAME    your own nn.Module class, function that returns a module, or module

Models are built under `torch.device("meta")`. A constructor that reads values (`.item()`, `.tolist()`, NumPy) cannot
run there; it runs on the CPU without its initialisers (see `construction.construct`). Weights are never loaded, and
nothing is downloaded for the three collections.
"""

from fxmem.cli.spec_names import SPEC_FORMS
from fxmem.cli.specs.models import BuiltModel, build_model, parse_settings

__all__ = ["SPEC_FORMS", "BuiltModel", "build_model", "parse_settings"]
