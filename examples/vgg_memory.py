"""Where VGG-16 and VGG-19 keep their memory: the weights in the classifier, the activations in the first two blocks.

A block is a run of convolutions and ReLUs that ends in a pooling. Checkpointing or a smaller batch helps where the
activations are; another optimizer or a smaller head helps where the weights are. They are not the same places.
"""

import torch
import torchvision

import fxmem

MIB = 2**20
images = torch.empty(32, 3, 224, 224, device="meta")

for build in (torchvision.models.vgg16, torchvision.models.vgg19):
    analysis = fxmem.analyze(build, images, optimizer="sgd-momentum", target="rtx4090")
    params, saved = {}, {}
    part, block = "", 1
    for node in analysis.profile.nodes:
        if node.module.startswith("features."):
            part = f"block {block}"
            block += node.module_type == "MaxPool2d"
        elif node.module.startswith("classifier."):
            part = "classifier"
        if part and node.op == "call_module":
            params[part] = params.get(part, 0) + node.params_bytes
            saved[part] = saved.get(part, 0) + node.saved_bytes

    print(f"{build.__name__}, batch of 32    parameters       saved for backward")
    for part in params:
        share_of_params = params[part] / sum(params.values())
        share_of_saved = saved[part] / sum(saved.values())
        print(
            f"  {part:<18}{params[part] / MIB:>10.1f} MiB {share_of_params:>4.0%}{saved[part] / MIB:>14.1f} MiB "
            f"{share_of_saved:>4.0%}"
        )
    print(f"  {'all':<18}{sum(params.values()):>10,} bytes{sum(saved.values()):>16,} bytes")
    peak, card = analysis.peak, analysis.profile.target
    print(
        f"  peak {peak.requested_bytes / MIB:.0f} MiB of {card.memory_bytes / MIB:.0f} MiB on the "
        f"{card.full_name}, "
        f"in {peak.phase} of {peak.node}\n"
    )
