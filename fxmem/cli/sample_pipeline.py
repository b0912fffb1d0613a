"""What the card of a pipeline of diffusers does, as the program that `diffusers:NAME` stands for.

A picture or a film of the size and in the steps of the card, or of those given. It is copied, to be a program of the
user's own, and asks no network: what is not cached is of fxmem's table.
"""

import argparse
import importlib
from typing import Any

import torch

from fxmem.simulation.stand_ins import hub_pipelines

parser = argparse.ArgumentParser()
parser.add_argument("name")
for option in ("--height", "--width", "--frames", "--steps", "--batch"):
    parser.add_argument(option, type=int)
options = parser.parse_args()

diffusers: Any = importlib.import_module("diffusers")
entry: Any = hub_pipelines.find(options.name)
names = ("height", "height"), ("width", "width"), ("frames", "num_frames"), ("steps", "num_inference_steps")
sizes = ((name, getattr(options, option)) for option, name in names)
call = entry.values["call"] | {name: value for name, value in sizes if value is not None}
dtypes = {name: getattr(torch, part["dtype"]) for name, part in entry.parts.items() if "dtype" in part}
dtypes["default"] = getattr(torch, entry.values["dtype"])

pipeline = diffusers.DiffusionPipeline.from_pretrained(entry.name, torch_dtype=dtypes, local_files_only=True)
pipeline.to("cuda")
pipeline(prompt=["a cat with a sign that says hello world"] * (options.batch or 1), **call)
