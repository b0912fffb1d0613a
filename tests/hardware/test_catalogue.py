"""The catalogue of machines, how it is asked, and what cuDNN is told of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxmem.errors import UsageError
from fxmem.hardware.catalogue import (
    CATALOGUE,
    device_properties,
    load_target,
    names,
    part_assumption,
    target,
    with_torch,
)
from fxmem.hardware.context import context_range
from fxmem.records.profile import Target

CARDS = [name for name in names() if name != "cpu"]

CUDNN_KEYS = {
    "deviceVer", "multiProcessorCount", "warpSize", "maxSharedMemoryPerBlock", "maxSharedMemoryPerBlockOptin",
    "reservedSharedMemoryPerBlock", "maxRegistersPerSM", "maxCtasPerSM", "maxThreadsPerBlock", "maxThreadsPerSM",
    "regsPerBlock", "totalGlobalMem", "smClockRateKHz", "memClockRateKHz", "l2CacheSize", "maxBlockSize", "maxGridSize",
    "supportCoopLaunch", "pciDeviceId", "isTccDriver", "cudaDeviceId", "driverVer", "deviceName",
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_every_card_has_its_figures_and_says_where_they_are_from(name: str) -> None:
    card = CATALOGUE[name]
    assert card.source
    assert card.target.memory_bytes
    assert card.target.capability
    assert card.rates_source or card.rates is None
    assert set(card.reached) == {"infer", "train"}
    assert min(card.multi_processors, card.sm_clock_mhz, card.memory_clock_mhz, card.l2_bytes) > 0


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("t4", 16), ("v100", 16), ("v100-32gb", 32), ("rtx3080", 10), ("rtx3090", 24), ("rtx3060", 12), ("rtx4080", 16),
     ("rtx4090", 24), ("rtx4060", 8), ("rtx5090", 32), ("a10", 24), ("a10g", 24), ("a100", 40), ("a100-80gb", 80),
     ("a6000", 48), ("l4", 24), ("l40s", 48), ("h100", 80), ("h100-pcie", 80), ("h100-nvl", 94), ("h200", 141),
     ("gh200", 96)],
)  # fmt: skip
def test_memory_is_near_what_the_card_is_sold_as(name: str, gigabytes: int) -> None:
    # Less than the board carries (sold in GiB, HBM3e in GB), but never by more than a tenth.
    memory = target(name).memory_bytes
    assert memory is not None
    assert (
        0.9 * gigabytes * 2**30 < memory <= gigabytes * 2**30 or 0.9 * gigabytes * 1e9 < memory < 1.07 * gigabytes * 1e9
    )


@pytest.mark.parametrize(
    ("asked", "found"),
    [("cpu", "cpu"), ("H100", "h100"), (" h100_pcie", "h100-pcie"), ("A100 80GB", "a100-80gb"), ("a100-40gb", "a100"),
     ("RTX-4090", "rtx4090"), ("4090", "rtx4090"), ("NVIDIA H100 80GB HBM3", "h100"), ("Tesla T4", "t4"),
     ("NVIDIA GeForce RTX 3090", "rtx3090"), ("RTX A6000", "a6000"), ("V100-SXM2-32GB", "v100-32gb")],
)  # fmt: skip
def test_spellings(asked: str, found: str) -> None:
    assert target(asked) is CATALOGUE[found].target


def test_every_name_and_full_name_finds_its_own_card() -> None:
    for name, card in CATALOGUE.items():
        assert target(name) is target(card.target.full_name) is card.target


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("h1000", r"unknown target 'h1000': did you mean h100"),
        ("rtx409", r"did you mean rtx4090"),
        ("cuda", r"unknown target 'cuda': say which card: t4, v100"),
        ("GPU", r"say which card: t4"),
        ("quantum", r"unknown target 'quantum': expected one of cpu, t4"),
        ("", r"unknown target '': expected one of cpu"),
        ("rtx4075", r"did you mean .*, a card's memory \(12GB\), or a target file NAME.json"),
        ("24", r"unknown target '24': did you mean 24GB, a card of so much memory\?$"),
    ],
)
def test_unknown_names(asked: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        target(asked)
    assert "\n" not in str(raised.value)


def test_target_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "device": "cuda", "memory_bytes": 12884901888, "capability": [8, 6]}')
    assert (
        load_target(path)
        == target(str(path))
        == Target(name="mine", device="cuda", memory_bytes=12 << 30, capability=(8, 6))
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"expected a target file with the fields name, device, .* got .*mine.json': No such file"),
        ("{", r"is no JSON, or only a part of one"),
        ('{"name": "mine", "device": "tpu"}', r"device is wrong: Input should be 'cuda' or 'cpu'"),
        (
            '{"name": "mine", "device": "cuda", "capability": [9, 0], "memory": 3}',
            r"expected a target file with the fields name, device, .*memory is wrong: Extra inputs are not permitted",
        ),
        (
            '{"name": "mine", "device": "cuda", "capability": [9, 0], "memory_bytes": -3}',
            r"memory_bytes is wrong: .* greater than or equal to 0",
        ),
        (
            '{"name": "mine", "device": "cuda"}',
            r'does not say the card\'s compute capability; add e.g. "capability": \[9, 0\]',
        ),
    ],
)
def test_bad_target_files(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message) as raised:
        load_target(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", CARDS)
def test_device_properties(name: str) -> None:
    card = target(name)
    properties = device_properties(card).as_dict()
    assert set(properties) == CUDNN_KEYS
    assert json.loads(json.dumps(properties)) == properties
    assert card.capability is not None
    assert properties["deviceVer"] == 100 * card.capability[0] + 10 * card.capability[1]
    assert (properties["totalGlobalMem"], properties["deviceName"]) == (card.memory_bytes, card.full_name)
    numbers = [
        value
        for key, value in properties.items()
        if isinstance(value, int) and key not in {"pciDeviceId", "isTccDriver", "cudaDeviceId"}
    ]
    assert all(number > 0 for number in numbers if number != properties["reservedSharedMemoryPerBlock"])


def test_device_properties_of_the_h200() -> None:
    assert device_properties(target("h200")).as_dict() == {
        "deviceVer": 900, "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
        "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "regsPerBlock": 65536,
        "totalGlobalMem": 150110011392, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "l2CacheSize": 62914560,
        "maxBlockSize": [1024, 1024, 64], "maxGridSize": [2147483647, 65535, 65535], "supportCoopLaunch": 1,
        "pciDeviceId": 0, "isTccDriver": 0, "cudaDeviceId": 0, "driverVer": 13000, "deviceName": "NVIDIA H200",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "optin", "ctas", "threads"),
    [("v100", 98304, 32, 2048), ("t4", 65536, 16, 1024), ("a100", 166912, 32, 2048), ("a10", 101376, 16, 1536),
     ("l4", 101376, 24, 1536), ("h100", 232448, 32, 2048), ("b200", 232448, 32, 2048), ("rtx5090", 101376, 24, 1536)],
)  # fmt: skip
def test_limits_of_each_architecture(name: str, optin: int, ctas: int, threads: int) -> None:
    properties = device_properties(target(name))
    assert (
        properties.max_shared_memory_per_block_optin,
        properties.max_ctas_per_sm,
        properties.max_threads_per_sm,
    ) == (optin, ctas, threads)


def test_device_properties_of_a_card_of_ones_own() -> None:
    mine = Target(name="mine", device="cuda", memory_bytes=12 << 30, capability=(8, 6))
    properties = device_properties(mine)
    assert (properties.device_ver, properties.total_global_mem, properties.device_name) == (860, 12 << 30, "mine")
    assert properties.multi_processor_count == device_properties(target("rtx3080")).multi_processor_count
    unsized = device_properties(mine.model_copy(update={"memory_bytes": None}))
    assert unsized.total_global_mem == target("rtx3080").memory_bytes


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Target(name="cpu", device="cpu"), r"known for compute capabilities 7\.0, 7\.5, .*; target 'cpu' is no GPU"),
        (Target(name="new", device="cuda", capability=(13, 0)), r"target 'new' is of compute capability 13\.0"),
    ],
)
def test_no_device_properties(asked: Target, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        device_properties(asked)


def test_a_release_of_torch_is_said_behind_the_name_of_its_card(tmp_path: Path) -> None:
    card = target("rtx3060,torch=2.6")
    assert (card.name, card.torch, card.memory_bytes) == ("rtx3060", "2.6", target("rtx3060").memory_bytes)
    assert card == with_torch("RTX 3060", "2.6") == with_torch(target("3060"), "2.6")
    assert (card.release("2.11.0"), target("rtx3060").release("2.11.0")) == ("2.6", "2.11.0")
    assert with_torch(card, None) is card
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "device": "cuda", "capability": [8, 6], "torch": "2.6"}')
    assert load_target(path).torch == "2.6"


@pytest.mark.parametrize(
    ("name", "short", "gib"),
    [
        ("h100:3g.40gb", "h100:3g.40gb", 39.5),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "a100:3g.20gb", 19.5),
        ("h200:1g.18gb", "h200:1g.18gb", 16.0),
    ],
)
def test_a_mig_instance_is_a_card_of_its_own_memory(name: str, short: str, gib: float) -> None:
    part = target(name)
    whole = target(short.partition(":")[0])
    assert (part.name, part.memory_bytes, part.capability) == (short, int(gib * (1 << 30)), whole.capability)
    assert part.full_name == f"{whole.full_name} MIG {short.partition(':')[2]}"
    assert context_range(part) == context_range(whole)
    assert "kernels, workspaces and context are those of a whole" in (part_assumption(part) or "")
    assert device_properties(part).multi_processor_count == device_properties(whole).multi_processor_count
    assert target(f"{name}, torch=2.6").torch == "2.6"


@pytest.mark.parametrize("share", ["0.25", ".25", "25%"])
def test_a_share_of_a_card(share: str) -> None:
    assert target(f"h100:{share}").memory_bytes == (target("h100").memory_bytes or 0) // 4


def test_what_surrounds_a_program_may_stand_behind_its_card_in_any_order() -> None:
    one, other = (
        target("rtx3090,in-use=500MB,os=windows,torch=2.6"),
        target("rtx3090,torch=2.6,os=windows,in-use=500MB"),
    )
    assert one == other
    assert (one.in_use_bytes, one.system, one.torch) == (500_000_000, "windows", "2.6")
    assert target("rtx3090,os=linux") == target("rtx3090")
    assert one.spelling == "rtx3090,torch=2.6,in-use=500.000MB,os=windows"
    for each in (one, target("rtx4090"), target("h100:3g.40gb,in-use=3GiB"), target("24GB,torch=2.8")):
        assert target(each.spelling) == each
    assert target("cpu,os=windows") == target("cpu")
    assert target("24GB,os=windows").memory_bytes == 24 * 10**9
    assert part_assumption(target("24GB,in-use=1GB")) is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100:3g.20gb", r"a MIG instance of h100 whose memory is known, got '3g\.20gb': known are 1g\.10gb, "),
        ("rtx4090:1g.5gb", r"a MIG instance of rtx4090 whose memory is known, got '1g\.5gb': none is known"),
        ("cpu:0.5", r"a share of a card's memory, e\.g\. h100:0\.5, got cpu:0\.5"),
        ("h100,in-use=much", r"what other programs have of the card, e\.g\. in-use=2GiB, got 'much'"),
        ("t4,in-use=15GiB", r"to leave some of t4, 15,642,329,088 bytes, got '15GiB'"),
        ("h100:3g", r"a MIG instance of h100 whose memory is known, got '3g': known are 1g\.10gb, "),
        ("h100,inuse=2GiB", r"expected one of torch=, in-use=, os= behind a target, got 'inuse=2GiB'"),
        ("h100,os=beos", r"expected os=linux or os=windows, got 'beos'"),
    ],
)
def test_a_part_that_is_not_known_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        target(name)


@pytest.mark.parametrize(
    ("release", "message"),
    [
        ("1.13", r"expected a release of torch from 2\.4 on, got '1\.13': older ones are not known"),
        ("newest", r"expected a torch version such as 2\.11\.0, got 'newest'"),
    ],
)
def test_a_release_that_is_not_known_is_refused(release: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        target(f"h100,torch={release}")


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("24GB", 24 * 10**9), ("24 gib", 24 << 30), ("1.5g", 15 * 10**8), ("512MiB", 512 << 20), ("900mb", 9 * 10**8)],
)
def test_a_size_is_a_card(name: str, nbytes: int) -> None:
    assert target(name).memory_bytes == nbytes
