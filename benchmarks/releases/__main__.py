"""Ask the installed torch all questions; keep the answers beside those of other releases and print what differs.

    make releases [TORCH=latest]

The file in `benchmarks/results` has one entry a release. It holds, for each call, the log and whether fxmem's rule has
the same allocations. Exit code 1 when a rule fails that held on the first release of the file.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.releases.stand_in import build
from tests.memory.test_allocator import TORCH_ANSWERS


def ask(question: str, folder: dict[str, str], **settings: str) -> dict[str, Any]:
    """The answers of one process on the stand-in."""
    environment = {**os.environ, **folder, "ASK": question, **settings}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.releases.ask"], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def main() -> int:
    """Ask, write, compare."""
    path = max(RESULTS.glob("releases-*.json"), default=RESULTS / f"releases-{datetime.date.today()}.json")
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as made:
        card = build(Path(made))
        calls = ask("calls", card)
        release = calls.pop("torch")
        optimizers = ask("optimizers", card)
        allocator = {
            f"{text or 'defaults'}, {mib} MiB, {streams} streams": ask(
                *("allocator", card),
                SEED=str(seed),
                CARD_BYTES=str(mib << 20),
                PYTORCH_CUDA_ALLOC_CONF=text,
                STREAMS=str(streams),
            )
            for text, mib, seed, streams, _ in TORCH_ANSWERS[::3]
        }
    del optimizers["torch"]
    for each in allocator.values():
        del each["torch"]
    kept[release] = {"calls": calls, "optimizers": optimizers, "allocator": allocator}
    path.write_text(json.dumps(dict(sorted(kept.items())), indent=1, sort_keys=True) + "\n")
    first = kept[min(kept)]
    failed = 0
    for kind, answers in kept[release].items():
        for name, answer in answers.items():
            before = first[kind].get(name)
            if kind == "calls" and before and before.get("agrees") and not answer.get("agrees"):
                failed += 1
                print(f"{release}: {name}: {answer}")
            elif before != answer:
                print(f"{release} differs from {min(kept)}: {kind}, {name}: {before} -> {answer}")
    print(f"{release}: {sum(bool(a.get('agrees')) for a in calls.values())} of {len(calls)} calls as predicted")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
