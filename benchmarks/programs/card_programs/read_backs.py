"""What a program does with what it has read: masks, places, counts, sorting, sampling."""

import torch

torch.manual_seed(0)


def show(what: str) -> None:
    """The peaks since the last call."""
    print(what, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()


x = torch.randn(1 << 20, device="cuda")
ids = torch.arange(1 << 20, device="cuda") % 1000
mask = torch.zeros(1 << 20, dtype=torch.bool)
mask[::3] = True
known = mask.cuda()
show("made")
for name, call in {
    "masked": lambda: x[known],
    "masked set": lambda: x.clone().masked_fill_(known, 0.0),
    "nonzero": lambda: known.nonzero(),
    "where": lambda: torch.where(known),
    "unique": lambda: ids.unique(),
    "unique with places": lambda: ids.unique(return_inverse=True, return_counts=True),
    "unique by rows": lambda: ids.view(-1, 4).unique(dim=0),
    "consecutive": lambda: ids.unique_consecutive(return_counts=True),
    "bincount": lambda: ids.bincount(),
    "histc": lambda: x.histc(100),
    "sort": lambda: x.sort(),
    "sort stable": lambda: x.sort(stable=True),
    "sort rows": lambda: x.view(1024, 1024).sort(-1),
    "argsort ints": lambda: ids.argsort(),
    "topk": lambda: x.topk(100),
    "topk rows": lambda: x.view(1024, 1024).topk(10),
    "kthvalue": lambda: x.kthvalue(1000),
    "median": lambda: x.median(),
    "quantile": lambda: x[:100_000].quantile(0.9),
    "mode": lambda: ids.view(1024, 1024).mode(-1),
    "multinomial": lambda: x.abs().view(1024, 1024).multinomial(8),
    "multinomial, replaced": lambda: x.abs().view(1024, 1024).multinomial(8, replacement=True),
    "randperm": lambda: torch.randperm(1 << 20, device="cuda"),
    "randperm, small": lambda: torch.randperm(20_000, device="cuda"),
    "cumsum": lambda: x.cumsum(0),
    "cumsum rows": lambda: x.view(1024, 1024).cumsum(-1),
    "cumprod": lambda: x.cumprod(0),
    "cummax": lambda: x.view(1024, 1024).cummax(-1),
    "logcumsumexp": lambda: x.logcumsumexp(0),
    "searchsorted": lambda: torch.searchsorted(x.sort()[0], x),
    "bucketize": lambda: torch.bucketize(x, torch.linspace(-1, 1, 100, device="cuda")),
    "index_add": lambda: torch.zeros(1000, device="cuda").index_add_(0, ids, x),
    "index_put": lambda: torch.zeros(1000, device="cuda").index_put_((ids,), x, accumulate=True),
    "scatter_reduce": lambda: torch.zeros(1000, device="cuda").scatter_reduce_(0, ids, x, "amax"),
    "repeat_interleave": lambda: x[:1000].repeat_interleave(ids[:1000]),
    "isin": lambda: torch.isin(ids, torch.arange(0, 1000, 7, device="cuda")),
    "item": lambda: x.sum().item(),
    "equal": lambda: torch.equal(x, x.clone()),
    "allclose": lambda: torch.allclose(x, x.clone()),
    "any nan": lambda: bool(x.isnan().any()),
    "max": lambda: x.max().item(),
    "norm": lambda: x.norm().item(),
    "std": lambda: x.std().item(),
    "argmax": lambda: x.argmax().item(),
    "to list": lambda: ids[:100].tolist(),
    "cpu": lambda: x.cpu(),
    "half": lambda: x.half().sum(),
    "cdist": lambda: torch.cdist(x[: 1 << 16].view(-1, 64), x[: 1 << 16].view(-1, 64)),
    "einsum": lambda: torch.einsum("ij,kj->ik", x.view(1024, 1024), x.view(1024, 1024)),
    "int matmul": lambda: x[: 1 << 16].view(256, 256).double() @ x[: 1 << 16].view(256, 256).double(),
    "fft": lambda: torch.fft.fft(x.view(1024, 1024)),
    "rfft2": lambda: torch.fft.rfft2(x.view(4, 512, 512)),
    "fft, odd": lambda: torch.fft.fft(x[: 1_000_003 // 1009 * 1009].view(-1, 1009)),
    "stft": lambda: torch.stft(x[:160_000], 1024, return_complex=True, window=torch.hann_window(1024, device="cuda")),
    "svd": lambda: torch.linalg.svd(x[: 1 << 16].view(256, 256)),
    "svd, batched": lambda: torch.linalg.svd(x[: 1 << 16].view(64, 32, 32)),
    "svdvals": lambda: torch.linalg.svdvals(x[: 1 << 16].view(256, 256)),
    "qr": lambda: torch.linalg.qr(x[: 1 << 16].view(256, 256)),
    "eigh": lambda: torch.linalg.eigh(x[: 1 << 16].view(256, 256)),
    "eigh, batched": lambda: torch.linalg.eigh(x[: 1 << 16].view(64, 32, 32)),
    "eig": lambda: torch.linalg.eig(x[: 1 << 12].view(64, 64)),
    "inv": lambda: torch.linalg.inv(x[: 1 << 16].view(256, 256)),
    "solve": lambda: torch.linalg.solve(x[: 1 << 16].view(256, 256), x[: 1 << 16].view(256, 256)),
    "lstsq": lambda: torch.linalg.lstsq(x[: 1 << 16].view(512, 128), x[:512].view(512, 1)),
    "det": lambda: torch.linalg.det(x[: 1 << 16].view(64, 32, 32)),
    "matrix_exp": lambda: torch.linalg.matrix_exp(x[: 1 << 16].view(64, 32, 32)),
    "pinv": lambda: torch.linalg.pinv(x[: 1 << 16].view(512, 128)),
    "cholesky": lambda: torch.linalg.cholesky(torch.eye(256, device="cuda")),
    "cholesky_inverse": lambda: torch.cholesky_inverse(torch.eye(256, device="cuda")),
    "lu": lambda: torch.linalg.lu(x[: 1 << 16].view(256, 256)),
    "sparse matmul": lambda: torch.sparse.mm(
        torch.eye(1000, device="cuda").to_sparse(), torch.ones(1000, 64, device="cuda")
    ),
    "csr matmul": lambda: torch.eye(1000, device="cuda").to_sparse_csr() @ torch.ones(1000, 64, device="cuda"),
}.items():
    for _ in range(2):
        try:
            call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(name, str(error).splitlines()[0])
        show(name)
