"""A program that leaves processes running, however it ends: `python starts.py FOLDER ENDING`.

One samples, as a class without `close` does; one ignores that it is asked to end; one's own parent has ended, in a
session of its own.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import torch

DETACHED = """
from subprocess import DEVNULL, Popen
print(Popen(["sleep", "600"], start_new_session=True, stdout=DEVNULL).pid)
"""


def work() -> None:
    while True:
        time.sleep(1)


if __name__ == "__main__":
    sampler = multiprocessing.Process(target=work, daemon=True)
    sampler.start()
    shell = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600; true"])
    detached = subprocess.check_output([sys.executable, "-c", DETACHED], text=True).strip()
    print("STARTED", sampler.pid, shell.pid, detached, flush=True)
    model = torch.nn.Linear(8, 8).cuda()
    model(torch.randn(4, 8).cuda()).sum().backward()
    ending = sys.argv[1]
    if ending == "exception":
        raise ValueError("the program's own")
    if ending == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if ending == "kill":
        time.sleep(2.5)  # fxmem looks once a second
        os.kill(os.getpid(), signal.SIGKILL)
