"""Writes to files that are there, and to new ones, in some seventy ways; prints which worked and were read back.

python writes.py FOLDER ENDING, where ENDING is clean, exception, interrupt, kill or memory.
"""

import asyncio
import atexit
import bz2
import codecs
import concurrent.futures
import csv
import ctypes
import fileinput
import gzip
import io
import json
import logging
import lzma
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
import tarfile
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


def write_at_a_place(name: str) -> bool:
    descriptor = os.open(name, os.O_RDWR)
    os.pwrite(descriptor, b"first", 0)
    os.pwritev(descriptor, [b"se", b"cond"], 5)
    os.close(descriptor)
    return read(name).startswith(b"firstsecond")


def truncate_descriptor(name: str) -> bool:
    descriptor = os.open(name, os.O_RDWR)
    os.ftruncate(descriptor, 2)
    os.fsync(descriptor)
    os.close(descriptor)
    return os.path.getsize(name) == 2


def allocate(name: str) -> bool:
    with open(name, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 4096)
    return os.path.getsize(name) == 4096


def copy_in_the_kernel(name: str) -> bool:
    pathlib.Path("range").write_bytes(b"by range")
    with open("range", "rb") as source, open(name, "wb") as file:
        os.copy_file_range(source.fileno(), file.fileno(), 8)
    return read(name) == b"by range"


def send_in_the_kernel(name: str) -> bool:
    pathlib.Path("sent").write_bytes(b"by sendfile")
    with open("sent", "rb") as source, open(name, "wb") as file:
        os.sendfile(file.fileno(), source.fileno(), 0, 11)
    return read(name) == b"by sendfile"


def set_attribute(name: str) -> bool:
    os.setxattr(name, "user.step", b"3")
    return os.getxattr(name, "user.step") == b"3"


def write_below_a_folder_held(name: str) -> bool:
    held = os.open(".", os.O_RDONLY)
    descriptor = os.open(name, os.O_WRONLY | os.O_TRUNC, dir_fd=held)
    os.write(descriptor, b"below")
    os.close(descriptor)
    os.rename(name, "below", src_dir_fd=held, dst_dir_fd=held)
    os.close(held)
    return read("below") == b"below" and not os.path.exists(name)


def write_through_a_hard_link(name: str) -> bool:
    os.link(name, "linked")
    pathlib.Path("linked").write_bytes(b"linked")
    return read(name) == b"linked"


def write_through_a_soft_link(name: str) -> bool:
    os.symlink(os.path.abspath(name), "pointer")
    pathlib.Path("pointer").write_bytes(b"pointed")
    return read(name) == b"pointed" and os.path.islink("pointer")


def write_without_a_name(name: str) -> bool:
    descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR)
    os.write(descriptor, b"nameless")
    held = os.open(".", os.O_RDONLY)
    os.link(f"/proc/self/fd/{descriptor}", "named", dst_dir_fd=held)  # which follows the link
    os.close(held)
    os.close(descriptor)
    os.replace("named", name)
    return read(name) == b"nameless"


def write_raw(name: str) -> bool:
    with io.FileIO(name, "w") as file:
        file.write(b"raw")
    return read(name) == b"raw"


def write_encoded(name: str) -> bool:
    with codecs.open(name, "w", "utf-16") as file:
        file.write("coded")
    return read(name).decode("utf-16") == "coded"


def edit_in_place(name: str) -> bool:
    with fileinput.input(name, inplace=True) as lines:
        for _ in lines:
            print("edited")
    return read(name) == b"edited\n"


def write_rows(name: str) -> bool:
    with open(name, "w", newline="") as file:
        csv.writer(file).writerow(["step", 1])
    return read(name) == b"step,1\r\n"


def write_tar(name: str) -> bool:
    pathlib.Path("member").write_bytes(b"in tar")
    with tarfile.open(name, "w:gz") as archive:
        archive.add("member")
    with tarfile.open(name) as archive:
        archive.extractall("unpacked", filter="data")
    return read("unpacked/member") == b"in tar"


def write_bz2_and_xz(name: str) -> bool:
    pathlib.Path(name).write_bytes(bz2.compress(b"two"))
    with lzma.open("xz", "wb") as file:
        file.write(b"xz")
    return bz2.open(name).read() == b"two" and lzma.open("xz").read() == b"xz"


def make_archive(_: str) -> bool:
    os.makedirs("packed", exist_ok=True)
    pathlib.Path("packed/file").write_bytes(b"packed")
    shutil.make_archive("archive", "zip", "packed")
    shutil.unpack_archive("archive.zip", "restored")
    return read("restored/file") == b"packed"


def save_arrays(name: str) -> bool:
    with open(name, "wb") as file:
        np.savez_compressed(file, weight=np.ones(4))
    np.savetxt("text", np.ones(2))
    return np.load(name)["weight"].sum() == 4 and np.loadtxt("text").sum() == 2


def map_tensor(name: str) -> bool:
    tensor = torch.from_file(name, shared=True, size=16, dtype=torch.uint8)
    tensor.fill_(7)
    return read(name)[:16] == bytes([7] * 16)


def write_in_a_loop(name: str) -> bool:
    async def write() -> bool:
        return await asyncio.to_thread(open_to_write, name)

    return asyncio.run(write())


def write_when_deleted(name: str) -> bool:
    class Deleted:
        def __del__(self) -> None:
            open_to_write(name)

    Deleted()
    return read(name) == b"new"


def write_when_terminated(name: str) -> bool:
    signal.signal(signal.SIGTERM, lambda *_: open_to_write(name))
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return read(name) == b"new"


def exchange_in_c(name: str) -> bool:
    before = read(name)
    pathlib.Path("other").write_bytes(b"exchanged")
    if libc.renameat2(-100, name.encode(), -100, b"other", 2):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return read(name) == b"exchanged" and read("other") == before


def punch_in_c(name: str) -> bool:
    descriptor = libc.open(name.encode(), os.O_RDWR)
    if descriptor < 0 or libc.fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(4)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    os.close(descriptor)
    return read(name).startswith(bytes(4))


def run_tee(name: str) -> bool:
    subprocess.run(["tee", "-a", name], input=b"tee", stdout=subprocess.DEVNULL, check=True)
    return read(name).endswith(b"tee")


def run_dd(name: str) -> bool:
    subprocess.run(["dd", "if=/proc/self/comm", f"of={name}", "status=none"], check=True)
    return read(name) == b"dd\n"


def run_sed(name: str) -> bool:
    subprocess.run(["sed", "-i", "s/.*/sed/", name], check=True)
    return read(name).strip() == b"sed"


def run_into_a_file(name: str) -> bool:  # opened here
    with open(name, "wb") as file:
        subprocess.run(["echo", "redirected"], stdout=file, check=True)
    return read(name) == b"redirected\n"


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
