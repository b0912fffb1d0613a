"""The machines a prediction can be made for: the CPU and a catalogue of NVIDIA cards.

What a card decides: whether the step fits (total memory), which kernels run (compute capability), and what cuDNN
answers when it is asked for a workspace (the device properties).

Figures and where they come from
- Limits of an architecture: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the same
  numbers as code in NVIDIA/cccl, `libcudacxx/include/cuda/__device/arch_traits.h`.
- Those of single cards: `fxmem.hardware.catalogue`.
- What a process takes of the card beside the allocator's segments: `fxmem.hardware.context`.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import Field

from fxmem.errors import UsageError
from fxmem.hardware.releases import check_release
from fxmem.records import json_reader
from fxmem.records.parts import RankGroup
from fxmem.records.profile import Bytes, Record, Target

# --- every card that fxmem knows by name: the rows of `cards.toml` beside this file, as records -----------------------


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
    """What Python, autograd and the dispatcher take to issue an operator: the card waits for it. It depends on the
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
    placing_source: str = ""
    """Where it was seen that its driver places segments as `AddressSpace` has it; empty: nowhere."""
    slices_gib: Mapping[str, float] = {}
    """GiB of its MIG instances, by profile, as `nvidia-smi mig -lgip` prints them."""
    windows_bytes: Bytes = 0
    """What Windows reports of its memory, where that is not the size it is sold with."""


_TABLES: Final = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))


def _read_catalogue() -> dict[str, Card]:
    reached: dict[tuple[str, str], Reached] = {}
    for name, mode, row in ((name, *each) for name, modes in _TABLES["reached"].items() for each in modes.items()):
        micro = {f"{what}_seconds": row.pop(f"{what}_us") * 1e-6 for what in ("launch", "issue")}
        reached[name, mode] = Reached(**row, **micro)
    cards = {}
    for name, row in _TABLES["cards"].items():
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


# --- the machines a prediction can be made for: the CPU and a catalogue of NVIDIA cards -------------------------------


class DeviceProperties(Record):
    """What cuDNN (9.8 and later) wants to know of a device that is not there.

    `as_dict()` is the JSON of `CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION`: 23 keys, all required. Of these, in
    practice, only the compute capability moves cuDNN's answers.
    """

    device_ver: int = Field(serialization_alias="deviceVer")
    """100 x major + 10 x minor compute capability."""
    multi_processor_count: int = Field(serialization_alias="multiProcessorCount")
    warp_size: int = Field(default=32, serialization_alias="warpSize")
    """Threads."""
    max_shared_memory_per_block: int = Field(default=49152, serialization_alias="maxSharedMemoryPerBlock")
    """Bytes, without opting in."""
    max_shared_memory_per_block_optin: int = Field(serialization_alias="maxSharedMemoryPerBlockOptin")
    """Bytes."""
    reserved_shared_memory_per_block: int = Field(serialization_alias="reservedSharedMemoryPerBlock")
    """Bytes the driver keeps for itself."""
    max_registers_per_sm: int = Field(default=65536, serialization_alias="maxRegistersPerSM")
    max_ctas_per_sm: int = Field(serialization_alias="maxCtasPerSM")
    """Resident thread blocks."""
    max_threads_per_sm: int = Field(serialization_alias="maxThreadsPerSM")
    total_global_mem: Bytes = Field(serialization_alias="totalGlobalMem")
    sm_clock_rate_khz: int = Field(serialization_alias="smClockRateKHz")
    mem_clock_rate_khz: int = Field(serialization_alias="memClockRateKHz")
    l2_cache_size: Bytes = Field(serialization_alias="l2CacheSize")
    device_name: str = Field(serialization_alias="deviceName")

    def as_dict(self) -> dict[str, Any]:
        """The same under cuDNN's names, ready for `json.dumps`."""
        return {**_OF_EVERY_CARD, **self.model_dump(mode="json", by_alias=True)}


_OF_EVERY_CARD: Final = {
    **{"maxThreadsPerBlock": 1024, "regsPerBlock": 65536, "supportCoopLaunch": 1, "isTccDriver": 0},
    **{"maxBlockSize": [1024, 1024, 64], "maxGridSize": [2147483647, 65535, 65535]},
    **{"pciDeviceId": 0, "cudaDeviceId": 0, "driverVer": 13000},
}
"""Threads in x, y, z of a block, blocks of a grid; 1000 x major + 10 x minor CUDA version of the driver."""


class _Architecture(NamedTuple):
    """Limits that all cards of one compute capability share."""

    shared_memory_per_sm: Bytes
    reserved_shared_memory: Bytes
    """Per block; what a block can opt in to is `shared_memory_per_sm` less this."""
    blocks_per_sm: int
    threads_per_sm: int


_ARCHITECTURES = {tuple(row.pop("capability")): _Architecture(**row) for row in _TABLES["architectures"]}


_SLICE = re.compile(r"(.+?)(?::| mig )([0-9]g\S*)", re.IGNORECASE)
_SHARE = re.compile(r"(.+):(0?\.[0-9]+|[0-9]{1,2}%)")
_CLOSE = 50
"""Two sizes are of one card where they differ by less than this share, one in so many."""


def names() -> tuple[str, ...]:
    """Names `target` accepts, in the order of the catalogue."""
    return tuple(CATALOGUE)


def target(name: str) -> Target:
    """The target of that name, whatever its case, dashes, underscores and spaces.

    Also understood: the name a driver gives the card (`NVIDIA H100 80GB HBM3`), common other names (`4090`,
    `a100-40gb`), a size (`24GB`; see `part_assumption`), a MIG instance (`h100:3g.40gb`) or a share of the memory, as
    schedulers give it out (`h100:0.5`), and the path of a target file, recognised by `.json` (see `load_target`).

    Behind it, what surrounds the program there: `,torch=2.6` (`with_torch`), `,in-use=2GiB` of other programs, and
    `,os=windows`.

    Raises:
        UsageError: no such target; the message lists the nearest names, or all of them. No such release.
    """
    card, _, option = name.rpartition(",")
    key, _, value = option.strip().partition("=")
    if card and key in _AROUND:
        return _AROUND[key](target(card), value)
    if card and value and not name.lower().endswith(".json"):
        known = ", ".join(f"{each}=" for each in _AROUND)
        raise UsageError(f"expected one of {known} behind a target, got {option.strip()!r}")
    if name.lower().endswith(".json"):
        return load_target(name)
    if (key := _key(name)) in _BY_KEY:
        return CATALOGUE[_BY_KEY[key]].target
    if (sized := _target_of_size(name)) is not None:
        return sized
    if (part := _SLICE.fullmatch(name)) is not None:
        return _slice(target(part[1]), part[2].lower())
    if (part := _SHARE.fullmatch(name)) is not None:
        return _share(target(part[1]), part[2])
    if _target_of_size(f"{name}GB") is not None:
        raise UsageError(f"unknown target {name!r}: did you mean {name.strip()}GB, a card of so much memory?")
    fields = '{"name": "mine", "device": "cuda", "memory_bytes": 25250627584, "capability": [8, 9]}'
    advice = f"a card's memory (12GB), or a target file NAME.json: {fields}"
    raise UsageError(f"unknown target {name!r}: {_suggestion(name)}, {advice}")


def with_torch(card: str | Target, torch: str | None) -> Target:
    """The target with this release of torch on it, e.g. "2.6"; None for the one that it has.

    Raises:
        UsageError: no such target; no version, or that of a release which is not known.
    """
    found = target(card) if isinstance(card, str) else card
    return found if torch is None else found.model_copy(update={"torch": check_release(torch)})


def _with_in_use(card: Target, size: str) -> Target:
    nbytes = _read_size(size)
    if nbytes is None:
        raise UsageError(f"expected what other programs have of the card, e.g. in-use=2GiB, got {size!r}")
    if nbytes >= (card.memory_bytes or math.inf):
        memory = f"{card.name}, {card.memory_bytes:,} bytes"
        raise UsageError(f"expected other programs to leave some of {memory}, got {size!r}")
    return card.model_copy(update={"in_use_bytes": nbytes})


def _with_system(card: Target, system: str) -> Target:
    """The card under an operating system; Windows reports what is on the board, of which Linux drivers keep a little.

    Raises:
        UsageError: another than `linux` and `windows`.
    """
    if system not in ("linux", "windows"):
        raise UsageError(f"expected os=linux or os=windows, got {system!r}")
    if system == "linux" or card.device != "cuda":
        return card
    known = CATALOGUE.get(card.name)
    memory = card.memory_bytes if known is None else known.windows_bytes or known.sold_gb << 30
    return card.model_copy(update={"system": system, "memory_bytes": memory})


_AROUND: Final[dict[str, Callable[[Target, str], Target]]] = {
    "torch": with_torch,
    "in-use": _with_in_use,
    "os": _with_system,
}
"""What may stand behind a target's name."""


def _slice(card: Target, profile: str) -> Target:
    known = CATALOGUE[card.name].slices_gib if card.name in CATALOGUE else {}
    if profile not in known:
        told = f"known are {', '.join(known)}" if known else "none is known"
        raise UsageError(f"expected a MIG instance of {card.name} whose memory is known, got {profile!r}: {told}")
    return _part(card, profile, f"{card.full_name} MIG {profile}", int(known[profile] * (1 << 30)))


def _share(card: Target, share: str) -> Target:
    part = Fraction(share.rstrip("%")) / (100 if share.endswith("%") else 1)
    if card.memory_bytes is None or not part:
        raise UsageError(f"expected a share of a card's memory, e.g. h100:0.5, got {card.name}:{share}")
    return _part(card, share, f"{share} of {card.full_name}", int(card.memory_bytes * part))


def _part(card: Target, part: str, full_name: str, nbytes: int) -> Target:
    named = {"name": f"{card.name}:{part}", "full_name": full_name, "memory_bytes": nbytes}
    return card.model_copy(update=named)


def _find_card(card: Target) -> Card | None:
    """The catalogue's card that a target is, or is a part of."""
    return CATALOGUE.get(card.name.partition(":")[0])


def find_by_memory(nbytes: int) -> tuple[str, ...]:
    """Names of the cards with so much memory, give or take what a driver and ECC keep of it."""
    cards = ((name, each.target.memory_bytes) for name, each in CATALOGUE.items())
    return tuple(name for name, memory in cards if memory is not None and abs(memory - nbytes) * _CLOSE <= nbytes)


def load_target(path: str | Path) -> Target:
    """A target read from a JSON file with the fields of `fxmem.records.profile.Target`.

    For a card: `{"name": "mine", "device": "cuda", "memory_bytes": 25250627584, "capability": [8, 9]}`. A `cuda`
    target needs its capability; without `memory_bytes` it is not known whether a step fits.

    Raises:
        UsageError: the file cannot be read or does not describe a target.
    """
    expected = f"expected a target file with the fields {', '.join(Target.model_fields)}"
    path = Path(path)
    read = json_reader.load(Target, path, expected)
    if read.torch:
        check_release(read.torch)
    if read.device == "cuda" and read.capability is None:
        raise UsageError(
            f'target file {str(path)!r} does not say the card\'s compute capability; add e.g. "capability": [9, 0]'
        )
    return read


def device_properties(target: Target) -> DeviceProperties:
    """What to tell cuDNN of a target.

    A card that is not in the catalogue (a target file) gets the figures of the catalogue's first card of its
    architecture, under its own name and with its own memory.

    Raises:
        UsageError: the target is no GPU, or of an architecture whose limits are not in the table; cuDNN would answer
            for it all the same, with plans the card might not run.
    """
    architecture = None if target.capability is None else _ARCHITECTURES.get(target.capability)
    if target.capability is None or architecture is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in _ARCHITECTURES)
        has = "no GPU" if target.capability is None else "of compute capability {}.{}".format(*target.capability)
        raise UsageError(
            f"device properties are known for compute capabilities {known}; target {target.name!r} is {has}"
        )
    alike = [card for card in CATALOGUE.values() if card.target.capability == target.capability]
    card = next((card for card in alike if card is _find_card(target)), alike[0])
    major, minor = target.capability
    return DeviceProperties(
        device_ver=100 * major + 10 * minor,
        multi_processor_count=card.multi_processors,
        max_shared_memory_per_block_optin=architecture.shared_memory_per_sm - architecture.reserved_shared_memory,
        reserved_shared_memory_per_block=architecture.reserved_shared_memory,
        max_ctas_per_sm=architecture.blocks_per_sm,
        max_threads_per_sm=architecture.threads_per_sm,
        total_global_mem=(card.target.memory_bytes or 0) if target.memory_bytes is None else target.memory_bytes,
        sm_clock_rate_khz=1000 * card.sm_clock_mhz,
        mem_clock_rate_khz=1000 * card.memory_clock_mhz,
        l2_cache_size=card.l2_bytes,
        device_name=target.full_name or target.name,
    )


_SIZE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(g|gb|gib|mb|mib)", re.IGNORECASE)
_UNITS = {"GB": 10**9, "GIB": 1 << 30, "MB": 10**6, "MIB": 1 << 20}
"""Bytes of each unit, in capitals."""


def _target_of_size(name: str) -> Target | None:
    """A card of which only the size is said; None if `name` is no size."""
    match, nbytes = _SIZE.fullmatch(name.strip()), _read_size(name)
    if match is None or not nbytes:
        return None
    size, unit = match[1], "GB" if match[2] in "gG" else match[2].upper().replace("I", "i")
    capability, full_name = _card_of_size(nbytes).capability, f"a card of {size} {unit}"
    return Target(name=f"{size}{unit}", device="cuda", full_name=full_name, memory_bytes=nbytes, capability=capability)


def _read_size(text: str) -> int | None:
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else int(Fraction(match[1]) * _UNITS["GB" if match[2] in "gG" else match[2].upper()])


def _card_of_size(nbytes: int) -> Target:
    """The catalogue's card that is nearest in memory: the newest of equally near ones."""
    cards = [card.target for card in CATALOGUE.values() if card.target.device == "cuda"]

    def distance(card: Target) -> tuple[float, tuple[int, ...]]:
        # Cards that are sold as of one size differ by a tenth in what their driver reports.
        apart = abs((card.memory_bytes or 0) / nbytes - 1)
        return round(apart, 1), tuple(-part for part in card.capability or ())

    return min(cards, key=distance)


def part_assumption(target: Target) -> str | None:
    """What is taken for granted of a part of a card, and of one of which only the size was said; None of others."""
    if ":" in target.name and (whole := _find_card(target)) is not None:
        return (
            f"{target.name} has its share of the memory alone; kernels, workspaces and context are those of a whole "
            f"{whole.target.name}; its speed is not known"
        )
    sized = _target_of_size(target.name)
    if target.memory_bytes is None or sized is None or sized.memory_bytes != target.memory_bytes:
        return None
    like = _card_of_size(target.memory_bytes)
    return (
        f"of the card only its size is known, {target.memory_bytes:,} bytes: kernels and workspaces are those of "
        f"{like.name}, the card of the catalogue nearest in size; its speed is not known"
    )


def same_card(target: Target, card: str) -> bool:
    """Whether a target is the card that a driver gives this name, or a part of it."""
    known = _find_card(target)
    return _key(card) in (_key(target.full_name), _key(target.name), _key(known.target.full_name if known else ""))


def has_known_placing(target: Target) -> bool:
    """Whether it is known where a card's driver places segments."""
    return any(card.placing_source and same_card(target, card.target.full_name) for card in CATALOGUE.values())


def is_alike(target: Target, card: str) -> bool:
    """Whether two cards of the catalogue have the same compute capability and as many multiprocessors."""
    mine = _find_card(target)
    other = CATALOGUE.get(_BY_KEY.get(_key(card), ""))
    alike = [each and (each.target.capability, each.multi_processors) for each in (mine, other)]
    return None not in alike and alike[0] == alike[1]


def _key(name: str) -> str:
    return re.sub(r"^(nvidia|tesla|geforce)+", "", re.sub(r"[^a-z0-9]", "", name.lower()))


_BY_KEY: dict[str, str] = {
    _key(spelling): name
    for name, card in CATALOGUE.items()
    for spelling in (name, card.target.full_name, *card.aliases, name.removeprefix("rtx"))
}


def _suggestion(name: str) -> str:
    # `cuda` says which kind of machine, not which one: nothing is near it.
    if _key(name) in {"cuda", "gpu"}:
        return f"say which card: {', '.join(name for name in CATALOGUE if name != 'cpu')}"
    near = list(dict.fromkeys(_BY_KEY[key] for key in get_close_matches(_key(name), _BY_KEY, n=3, cutoff=0.6)))
    return (f"did you mean {' or '.join(near)}? Known are" if near else "expected one of") + f" {', '.join(CATALOGUE)}"


# --- how fast cards send to each other and the host, and what NCCL takes ----------------------------------------------


PER_MACHINE: Final = 8
"""Cards of one machine."""
NVLINK: Final = {(7, 0): 150e9, (8, 0): 300e9, (9, 0): 450e9, (10, 0): 900e9, (10, 3): 900e9}
"""By compute capability, bytes a second in one direction between the cards of a machine: NVIDIA's data sheets of V100,
A100, H100, B200 and B300, in their SXM form."""
_NETWORK: Final = 50e9
"""Between machines: one port of 400 Gbit/s for each card, as in a DGX H100."""
_HOST: Final = {7: 12.2e9, 8: 26.0e9, 9: 55.6e9, 10: 55.6e9, 12: 55.6e9}
"""By major compute capability, bytes a second in one direction between a card and pinned memory of the host, as
measured over 16 lanes of the PCI Express that such cards have. 3.0: CUDA's bandwidthTest in pull request 82 of
mpicbg-scicomp/gearshifft; 4.0: README of NVIDIA/nvbandwidth, a machine of 8 cards; 5.0: NVIDIA's example of the same
tool's host_to_device_memcpy_ce."""
_GRACE: Final = 450e9
"""The same over NVLink-C2C: half of the 900 GB/s of NVIDIA's data sheets of GH200 and GB200."""
SENT_AHEAD: Final = 2
"""Copies of offloaded results to the host that may be under way before the step waits for the first of them."""
FETCHED_AHEAD: Final = 2
"""Copies back that are begun before they are asked for."""


def bytes_per_second(target: Target, group: RankGroup) -> float | None:
    """What a rank sends in a second to its neighbours in a group; None where it is not known."""
    if group.size * group.spread > PER_MACHINE:
        return _NETWORK
    return None if target.capability is None else NVLINK.get(target.capability)


def host_bytes_per_second(target: Target) -> float | None:
    """What a card sends to pinned memory of the host in a second; None where it is not known.

    It gets as much from there.
    """
    if target.name.startswith(("gb200", "gh200")):
        return _GRACE
    return None if target.capability is None else _HOST.get(target.capability[0])
