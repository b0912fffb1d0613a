"""Writes to files that are there, and to new ones, in some forty ways; prints which worked and were read back.

python writes.py FOLDER ENDING, where ENDING is clean, exception, interrupt, kill or memory.
"""

import atexit
import concurrent.futures
import ctypes
import gzip
import json
import logging
import mmap
import multiprocessing
import os
import pathlib
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import weakref
import zipfile

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file, save_model
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

folder, ending = pathlib.Path(sys.argv[1]), sys.argv[2]
os.chdir(folder)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
CONFIG = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=1, eos_token_id=1)
libc = ctypes.CDLL(None, use_errno=True)
libc.fopen.restype = ctypes.c_void_p


def read(name: str) -> bytes:
    return pathlib.Path(name).read_bytes()


def host(state: dict) -> dict:
    return {name: tensor.cpu() for name, tensor in state.items()}


def open_to_write(name: str) -> bool:
    with open(name, "wb") as file:
        file.write(b"new")
    return read(name) == b"new" and os.path.getsize(name) == 3


def open_to_append(name: str) -> bool:
    before = read(name)
    with open(name, "ab") as file:
        file.write(b"more")
    return read(name) == before + b"more"


def open_to_update(name: str) -> bool:
    with open(name, "r+b") as file:
        file.write(b"NEW")
    return read(name).startswith(b"NEW") and len(read(name)) > 3


def open_descriptor(name: str) -> bool:
    descriptor = os.open(name, os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, b"by descriptor")
    os.close(descriptor)
    return read(name) == b"by descriptor"


def write_by_pathlib(name: str) -> bool:
    pathlib.Path(name).write_text("pathlib")
    return read(name) == b"pathlib"


def truncate(name: str) -> bool:
    os.truncate(name, 1)
    return os.stat(name).st_size == 1


def remove(name: str) -> bool:
    os.remove(name)
    return not os.path.exists(name) and name not in os.listdir()


def replace_atomically(name: str) -> bool:
    with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
        file.write(b"atomic")
    os.replace(file.name, name)
    return read(name) == b"atomic" and not os.path.exists(file.name)


def rename(name: str) -> bool:
    before = read(name)
    os.rename(name, "renamed")
    return read("renamed") == before and not os.path.exists(name)


def copy_over(name: str) -> bool:
    pathlib.Path("source").write_bytes(b"copied")
    shutil.copyfile("source", name)
    return read(name) == b"copied"


def move_away(name: str) -> bool:
    shutil.move(name, "moved")
    return os.path.exists("moved") and not os.path.exists(name)


def clear_folder(_: str) -> bool:
    shutil.rmtree("old")
    os.makedirs("old/inner")
    pathlib.Path("old/inner/file").write_bytes(b"again")
    return [str(each) for each in sorted(pathlib.Path("old").rglob("*"))] == ["old/inner", "old/inner/file"]


def rename_folder(_: str) -> bool:
    os.rename("kept", "kept.1")
    return read("kept.1/file") == b"kept" and not os.path.exists("kept")


def rename_over_folder(_: str) -> bool:
    os.makedirs("full/inner")
    os.mkdir("empty")
    os.rename("full", "empty")
    return os.listdir("empty") == ["inner"] and not os.path.exists("full")


def replace_read_only(name: str) -> bool:
    os.chmod(name, 0o444)
    pathlib.Path("writable").write_bytes(b"new")
    os.replace("writable", name)
    return read(name) == b"new"


def change_rights(name: str) -> bool:
    os.chmod(name, 0o600)
    os.utime(name, (1, 1))
    return os.stat(name).st_mtime == 1 and os.stat(name).st_mode & 0o777 == 0o600


def link(name: str) -> bool:
    before = read(name)
    os.link(name, "hard")
    os.symlink(name, "soft")
    return read("hard") == read("soft") == before


def map_memory(name: str) -> bool:
    with open(name, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:3] = b"map"
    return read(name).startswith(b"map")


def dump_pickle(name: str) -> bool:
    with open(name, "wb") as file:
        pickle.dump(host(model.state_dict()), file)
    with open(name, "rb") as file:
        return len(pickle.load(file)) == 2


def dump_json(name: str) -> bool:
    pathlib.Path(name).write_text(json.dumps({"step": 1}))
    return json.loads(read(name)) == {"step": 1}


def save_numpy(name: str) -> bool:
    with open(name, "wb") as file:
        np.save(file, model.weight.detach().cpu().numpy())
    return np.load(name).shape == (64, 64)


def map_numpy(name: str) -> bool:
    mapped = np.memmap(name, np.uint8, "r+")
    mapped[:] = 7
    mapped.flush()
    return set(read(name)) == {7}


def write_array(name: str) -> bool:
    np.ones(4).tofile(name)
    return np.fromfile(name).sum() == 4


def write_zip(name: str) -> bool:
    with zipfile.ZipFile(name, "w") as archive:
        archive.writestr("x", "y")
    return zipfile.ZipFile(name).read("x") == b"y"


def write_gzip(name: str) -> bool:
    with gzip.open(name, "wb") as file:
        file.write(b"zipped")
    return gzip.open(name).read() == b"zipped"


def log(name: str) -> bool:
    handler = logging.FileHandler(name)
    logging.getLogger("x").addHandler(handler)
    logging.getLogger("x").error("logged")
    return read(name).endswith(b"logged\n")


def save_image(name: str) -> bool:
    Image.new("L", (4, 4)).save(name, "png")
    return Image.open(name).size == (4, 4)


def save_card(name: str) -> bool:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}, name)
    found = torch.load(name)
    model.load_state_dict(found["model"])
    return found["step"] == 5 and found["model"]["weight"].is_cuda and os.path.getsize(name) > 64 * 64 * 4


def save_card_in_file(name: str) -> bool:
    with open(name, "wb") as file:
        torch.save(model.state_dict(), file)
    shutil.copyfile(name, "best")
    with open("best", "rb") as file:
        return torch.load(file)["weight"].is_cuda


def save_host(name: str) -> bool:
    torch.save(host(model.state_dict()), name)
    return not torch.load(name)["weight"].is_cuda


def save_tensors(name: str) -> bool:
    save_file(model.state_dict(), name)
    save_model(model, "model")
    return load_file(name, device="cuda")["weight"].is_cuda and os.path.getsize("model") == os.path.getsize(name)


def save_tensors_of_host(name: str) -> bool:  # in Rust
    save_file(host(model.state_dict()), name)
    return load_file(name)["weight"].shape == (64, 64)


def save_pretrained(_: str) -> bool:
    network = GPT2LMHeadModel(CONFIG).cuda()
    network.save_pretrained("pretrained")
    shutil.rmtree("pretrained.best", ignore_errors=True)
    shutil.copytree("pretrained", "pretrained.best")
    return GPT2LMHeadModel.from_pretrained("pretrained.best").config.n_layer == 1


def write_database(name: str) -> bool:  # in C
    os.remove(name)
    with sqlite3.connect(name) as connection:
        connection.execute("create table runs (step)")
        connection.execute("insert into runs values (3)")
        return connection.execute("select step from runs").fetchall() == [(3,)]


def write_in_c(name: str) -> bool:
    file = ctypes.c_void_p(libc.fopen(name.encode(), b"w"))
    if not file:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    libc.fputs(b"from C", file)
    libc.fclose(file)
    return read(name) == b"from C"


def remove_in_c(name: str) -> bool:
    if libc.unlink(name.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return not os.path.exists(name)


def rename_in_c(name: str) -> bool:
    if libc.rename(name.encode(), b"renamed in C"):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return os.path.exists("renamed in C")


def run_cp(name: str) -> bool:
    subprocess.run(["cp", "/proc/self/comm", name], check=True)
    return read(name) == b"cp\n"


def run_rm(name: str) -> bool:
    subprocess.run(["rm", name], check=True)
    return not os.path.exists(name)


def run_shell(name: str) -> bool:
    return os.system(f"echo shell > {name}") == 0 and read(name) == b"shell\n"


def run_git(_: str) -> bool:
    subprocess.run(["git", "init", "-q", "."], check=True)
    return os.path.isdir(".git")


def run_python(name: str) -> bool:
    subprocess.run([sys.executable, "-c", f"open({name!r}, 'w').write('child')"], check=True)
    return read(name) == b"child"


def write_in_thread(name: str) -> bool:
    thread = threading.Thread(target=open_to_write, args=(name,))
    thread.start()
    thread.join()
    return read(name) == b"new"


def write_in_pool(name: str) -> bool:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return pool.submit(open_to_write, name).result()


def write_in_process(name: str) -> bool:
    process = multiprocessing.get_context("fork").Process(target=open_to_write, args=(name,))
    process.start()
    process.join()
    return read(name) == b"new"


class Writing(Dataset):
    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        open_to_write(self.name)
        return index


def write_in_worker(name: str) -> bool:
    list(DataLoader(Writing(name), num_workers=1))
    return read(name) == b"new"


def write_at_a_signal(name: str) -> bool:
    signal.signal(signal.SIGUSR1, lambda *_: open_to_write(name))
    os.kill(os.getpid(), signal.SIGUSR1)
    return read(name) == b"new"


def write_at_a_finalizer(name: str) -> bool:
    weakref.finalize(Writing(name), open_to_write, name)
    return read(name) == b"new"


def write_at_exit(name: str) -> bool:
    atexit.register(open_to_write, name)
    return True


WAYS = [each for each in list(globals().values()) if getattr(each, "__annotations__", {}).get("return") is bool]

if __name__ == "__main__":
    found = {}
    for step in range(2):
        model(torch.randn(8, 64).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for way in WAYS if step == 0 else ():
            try:
                found[way.__name__] = "ok" if way(way.__name__) else "not read back"
            except Exception as error:
                found[way.__name__] = f"{type(error).__name__}: {error}"
    print("WAYS", json.dumps(found), flush=True)
    if ending == "exception":
        raise ValueError("the program's own")
    if ending == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "memory":
        torch.empty(1 << 40, device="cuda")
