"""Run a command on a card that is not there: `python -m benchmarks.releases.stand_in python train.py`.

torch's C++ runs as it would on the card; CUDA's runtime, its driver and cuBLAS are replaced by functions that succeed
and compute nothing (`card.c`). So the caching allocator, autograd's engine and the host side of every kernel are
torch's own, and numbers in tensors are arbitrary. cuDNN is NVIDIA's and wants a card: set
`torch.backends.cudnn.enabled = False`. The card is set by CARD_CAPABILITY (90), CARD_SMS (132), CARD_BYTES, CARD_NAME.
Needs a C compiler and the CUDA wheel of torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib import util
from pathlib import Path

CARD = Path(__file__).parent / "card.c"
_LIBRARIES = ("libc10_cuda", "libtorch_cuda", "libtorch_python", "libcaffe2_nvrtc", "libtorch_cuda_linalg")
_WANTED = re.compile(r" (_*cuda[A-Z]\w*|cu[A-Z]\w*|cublas[A-Z]\w*|cu(?:solver|sparse|rand|fft)\w*)(?:@|$)")
_IDLE = '__attribute__((visibility("default"))) int {}(void) {{ return 0; }}\n'


def build(folder: Path) -> dict[str, str]:
    """Compile the stand-in for the installed torch; return the environment in which it stands in."""
    spec = util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    site = Path(spec.origin).parent.parent
    libraries = [site / "torch" / "lib" / f"{name}.so" for name in _LIBRARIES]
    has = set(re.findall(r"^EXPORT .*?(\w+)\(", CARD.read_text(), re.MULTILINE))
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *filter(Path.exists, libraries)], capture_output=True, text=True, check=True
    ).stdout
    wanted = {found[1] for line in listed.splitlines() if (found := _WANTED.search(line))}
    (folder / "idle.c").write_text("".join(map(_IDLE.format, sorted(wanted - has))))
    nvml = set(re.findall(rb"nvml[A-Z]\w+", libraries[0].read_bytes()))
    (folder / "nvml.c").write_text("".join(_IDLE.format(name.decode()) for name in sorted(nvml)))
    headers = [
        f"-I{site}/{folder}"
        for folder in ("nvidia/cuda_runtime/include", "nvidia/cu13/include", "triton/backends/nvidia/include")
    ]
    card = [CARD, folder / "idle.c"]
    for name, sources in (("libcard.so", card), ("libcuda.so.1", card), ("libnvidia-ml.so.1", [folder / "nvml.c"])):
        flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-w", "-O1", f"-Wl,-soname,{name}", *headers]
        subprocess.run(["gcc", *flags, "-o", folder / name, *sources], check=True)
    return {"LD_PRELOAD": str(folder / "libcard.so"), "LD_LIBRARY_PATH": str(folder)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, **build(Path(made))}).returncode)
