"""Resources for Kubernetes and Kueue, as a part of a Pod's spec.

Nodes are chosen by the labels of NVIDIA's GPU feature discovery, a part of its device plugin:
`nvidia.com/gpu.memory` is in MiB, `nvidia.com/gpu.product` the card's name with dashes.
"""

from __future__ import annotations

from fxmem.memory.allocator import AllocatorSettings
from fxmem.records.profile import Profile, Timeline
from fxmem.show.export.resources import find_resources


def write(profile: Profile, timeline: Timeline, settings: AllocatorSettings) -> str:
    """A container's limits, and the nodes that will do."""
    asked = find_resources(profile, timeline)
    limits = [f"nvidia.com/gpu: {asked.cards}"] if asked.cards else []
    limits += [f"memory: {asked.host_gib}Gi"] if asked.host_gib is not None else []
    lines = [*asked.comments(), "# of a Pod's spec, or of spec.template.spec of a Job"]
    lines += ["containers:", "  - name: train", f"    resources:{'' if limits else ' {}'}"]
    lines += ["      limits:", *(f"        {each}" for each in limits)] if limits else []
    if asked.cards:
        key, operator, value = "memory", "Gt", str(asked.least_mib)
        if asked.card is not None:
            key, operator, value = "product", "In", asked.card.target.full_name.replace(" ", "-")
        lines += [
            "affinity:",
            "  nodeAffinity:",
            "    requiredDuringSchedulingIgnoredDuringExecution:",
            "      nodeSelectorTerms:",
            "        - matchExpressions:",
            f'            - {{key: nvidia.com/gpu.{key}, operator: {operator}, values: ["{value}"]}}',
        ]
    return "\n".join(lines) + "\n"
