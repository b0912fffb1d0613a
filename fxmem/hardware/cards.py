"""Every card that fxmem knows by name: the rows of `cards.toml` beside this file, as records."""

from __future__ import annotations

import tomllib
from pathlib import Path

from fxmem.records.profile import Bytes, Record, Target


class Rates(Record):
    """Peak rates of a card, as its vendor publishes them: dense, without sparsity."""

    fp32: float
    """FLOP/s of float32 on the CUDA cores; what matrix products take by default
    (`torch.backends.cuda.matmul.allow_tf32` is off)."""
    tf32: float
    """FLOP/s of float32 convolutions, which cuDNN runs on tensor cores by default where there are any of that kind."""
    half: float
    """FLOP/s of float16 and, where there are any, bfloat16 products with float32 accumulation."""
    bandwidth: float
    """Bytes/s of the memory."""


class Reached(Record):
    """What a step's operators reach of a card's rates, fitted to times by `benchmarks/published/step_time.py`."""

    products: float
    """Share of the arithmetic rate in matrix products and attention."""
    convolutions: float
    """The same in convolutions."""
    bandwidth: float
    """Share of the memory's bandwidth."""
    convolution_bandwidth: float
    """The same in convolutions, which change their tensors' layout on the way."""
    launch_seconds: float
    """What an operator takes beside, on the card."""
    issue_seconds: float
    """What Python, autograd and the dispatcher take to issue an operator: the card waits for it. It hangs on the
    machine's CPU."""
    spread: tuple[float, float]
    """Measured time over the estimate on models that were not fitted, 10th and 90th percentile."""
    grounds: str
    """Which steps these were, in words."""


class Card(Record):
    """A catalogue entry: a target and what else is known of its card."""

    target: Target
    aliases: tuple[str, ...] = ()
    """Other names people give it."""
    sold_gb: int = 0
    """Its memory as it is sold, of which a driver reports less: the size that schedulers know it by."""
    multi_processors: int = 0
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0
    l2_bytes: Bytes = 0
    rates: Rates | None = None
    """None: there is no estimate of a step's time."""
    rates_source: str = ""
    """Where its vendor publishes them."""
    reached: dict[str, Reached]
    """What is reached of them, at inference ("infer") and in training ("train")."""
    source: str = ""
    """Where the memory figure was seen."""


def _read_catalogue() -> dict[str, Card]:
    tables = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))
    reached: dict[tuple[str, str], Reached] = {}
    for name, mode, row in ((name, *each) for name, modes in tables["reached"].items() for each in modes.items()):
        micro = {f"{what}_seconds": row.pop(f"{what}_us") * 1e-6 for what in ("launch", "issue")}
        reached[name, mode] = Reached(**row, **micro)
    cards = {}
    for name, row in tables["cards"].items():
        sets = row.pop("reached", {"infer": "any", "train": "any"})
        described = {field: row.pop(field) for field in row.keys() & Target.model_fields.keys()}
        cards[name] = Card(
            target=Target(**{"name": name, "device": "cuda", **described}),
            reached={mode: reached[of, mode] for mode, of in sets.items()},
            **row,
        )
    return cards


CATALOGUE = _read_catalogue()
"""Every target known by name."""
