"""The catalogue's rows: every card that fxmem knows by name, and what was published or seen of it.

Where the figures come from
- Total memory is what the driver reports (`cudaDeviceProp.totalGlobalMem`, `torch.cuda.mem_get_info()[1]`), less
  than the memory on the board and less than nvidia-smi shows. It moves by a few per cent with driver, operating
  system and ECC, so a figure seen with a recent Linux driver is taken, and each card's `source` says where it was
  seen. To predict for exactly your card, write its figure into a target file (`fxmem.hardware.catalogue.load_target`).
- Multiprocessors, clocks and L2 size: the same device queries; the RTX 4080's clock is NVIDIA's published boost clock.
- Rates: what the comment beside them names.
"""

from __future__ import annotations

from fxmem.records.profile import Bytes, Record, Target

MIB = 1 << 20


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


def _reached(
    shares: tuple[float, float, float, float],
    microseconds: tuple[float, float],
    spread: tuple[float, float],
    grounds: str,
) -> Reached:
    products, convolutions, bandwidth, convolution_bandwidth = shares
    launch, issue = microseconds
    return Reached(
        products=products,
        convolutions=convolutions,
        bandwidth=bandwidth,
        convolution_bandwidth=convolution_bandwidth,
        launch_seconds=launch * 1e-6,
        issue_seconds=issue * 1e-6,
        spread=spread,
        grounds=grounds,
    )


_INFERENCE, _TRAINING = "image models at inference on this card", "image models in training on this card"
_OF_ANY_CARD = {
    "infer": _reached(
        (0.71, 0.38, 0.61, 0.39), (2.3, 30), (0.7, 1.5), "image models at inference on an H100 and an RTX PRO 6000"
    ),
    "train": _reached((0.74, 0.18, 0.59, 0.16), (2.5, 40), (0.7, 1.5), "image models in training on an H100"),
}
"""By mode, for a card on which no step was measured. GeForce cards reach more of what their datasheets promise."""
_GEFORCE = {
    "infer": _reached((1.13, 0.73, 0.8, 0.56), (2.1, 20), (0.75, 1.2), "image models at inference on GeForce cards"),
    "train": _reached((0.963, 0.83, 0.626, 0.238), (2.24, 26), (0.75, 1.3), "image models in training on an RTX 3090"),
}
_RTX3090 = {
    "infer": _reached((1.12, 0.84, 0.79, 0.453), (2.16, 20), (0.91, 1.1), _INFERENCE),
    "train": _reached((0.963, 0.83, 0.626, 0.238), (2.24, 26), (0.89, 1.21), _TRAINING),
}
_RTX4090 = {**_GEFORCE, "infer": _reached((1.21, 0.65, 0.877, 0.617), (2.06, 20), (0.89, 1.09), _INFERENCE)}
_RTX5090 = {**_GEFORCE, "infer": _reached((1.06, 0.68, 0.746, 0.49), (2.1, 20), (0.87, 1.07), _INFERENCE)}
_H100 = {  # products: of a matrix product of 8192
    "infer": _reached((0.74, 0.394, 0.543, 0.322), (2.54, 32.6), (0.73, 1.26), _INFERENCE),
    "train": _reached((0.74, 0.181, 0.588, 0.158), (2.49, 43.1), (0.81, 1.2), _TRAINING),
}


def _rates(fp32: float, tf32: float, half: float, bandwidth: float) -> Rates:
    return Rates(fp32=fp32 * 1e12, tf32=tf32 * 1e12, half=half * 1e12, bandwidth=bandwidth * 1e9)


class Card(Record):
    """A catalogue entry: a target and what else is known of its card."""

    target: Target
    aliases: tuple[str, ...] = ()
    """Other names people give it."""
    multi_processors: int = 0
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0
    l2_bytes: Bytes = 0
    rates: Rates | None = None
    """None: there is no estimate of a step's time."""
    reached: dict[str, Reached] = _OF_ANY_CARD
    """What is reached of them, at inference ("infer") and in training ("train")."""
    source: str = ""
    """Where the memory figure was seen."""


def _gpu(name: str, full_name: str, capability: tuple[int, int], memory_bytes: int) -> Target:
    return Target(name=name, device="cuda", full_name=full_name, memory_bytes=memory_bytes, capability=capability)


def _xla(file: str) -> str:
    return f"openxla/xla, xla/backends/gpu/target_config/specs/{file}.txtpb"


def _query(driver: str) -> str:
    return f"deviceQuery, driver for CUDA {driver}"


CATALOGUE: dict[str, Card] = {
    card.target.name: card
    for card in (
        Card(target=Target(name="cpu", device="cpu", full_name="CPU")),
        Card(
            target=_gpu("t4", "Tesla T4", (7, 5), 15_642_329_088),
            multi_processors=40,
            sm_clock_mhz=1590,
            memory_clock_mhz=5001,
            l2_bytes=4 * MIB,
            rates=_rates(8.1, 8.1, 65.0, 320.0),  # NVIDIA T4 datasheet
            source=_query("12.5"),
        ),
        Card(
            target=_gpu("v100", "Tesla V100-SXM2-16GB", (7, 0), 16_935_682_048),
            multi_processors=80,
            sm_clock_mhz=1530,
            memory_clock_mhz=877,
            l2_bytes=6 * MIB,
            rates=_rates(15.7, 15.7, 125.0, 900.0),  # NVIDIA V100 datasheet, SXM2
            source=_xla("v100"),
            aliases=("v100-16gb",),
        ),
        Card(
            target=_gpu("v100-32gb", "Tesla V100-SXM2-32GB", (7, 0), 34_072_559_616),
            multi_processors=80,
            sm_clock_mhz=1530,
            memory_clock_mhz=877,
            l2_bytes=6 * MIB,
            rates=_rates(15.7, 15.7, 125.0, 900.0),  # NVIDIA V100 datasheet, SXM2: 16 or 32 GB, otherwise equal
            source=_query("12.9"),
        ),
        Card(
            target=_gpu("rtx3080", "NVIDIA GeForce RTX 3080", (8, 6), 10_472_390_656),
            multi_processors=68,
            sm_clock_mhz=1710,
            memory_clock_mhz=9501,
            l2_bytes=5 * MIB,
            rates=_rates(29.8, 29.8, 59.5, 760.0),  # NVIDIA Ampere GA102 whitepaper, table 2 (the 10 GB card)
            reached=_GEFORCE,
            source=_query("12.0"),
        ),
        Card(
            target=_gpu("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 25_414_860_800),
            multi_processors=82,
            sm_clock_mhz=1740,
            memory_clock_mhz=9751,
            l2_bytes=6 * MIB,
            rates=_rates(35.6, 35.6, 71.0, 936.0),  # NVIDIA Ampere GA102 whitepaper, table 2
            reached=_RTX3090,
            source=_query("12.2"),
        ),
        Card(
            target=_gpu("rtx4080", "NVIDIA GeForce RTX 4080", (8, 9), 16_049 * MIB),
            multi_processors=76,
            sm_clock_mhz=2505,
            memory_clock_mhz=11201,
            l2_bytes=64 * MIB,
            rates=_rates(48.7, 48.7, 97.5, 716.8),  # NVIDIA Ada whitepaper, table of the RTX 4080 (16 GB)
            reached=_GEFORCE,
            source="torch.cuda.get_device_properties, whole MiB",
        ),
        Card(
            target=_gpu("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 25_250_627_584),
            multi_processors=128,
            sm_clock_mhz=2520,
            memory_clock_mhz=10501,
            l2_bytes=72 * MIB,
            rates=_rates(82.6, 82.6, 165.2, 1008.0),  # NVIDIA Ada whitepaper
            reached=_RTX4090,
            source=_query("13.0"),
        ),
        Card(
            target=_gpu("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 33_677_180_928),
            multi_processors=170,
            sm_clock_mhz=2655,
            memory_clock_mhz=14001,
            l2_bytes=96 * MIB,
            rates=_rates(104.8, 104.8, 209.5, 1792.0),  # NVIDIA RTX Blackwell whitepaper
            reached=_RTX5090,
            source=f"{_query('12.8')}; github.com/aikitoria/open-gpu-kernel-modules/issues/1",
        ),
        Card(
            target=_gpu("a10", "NVIDIA A10", (8, 6), 23_696_375_808),
            multi_processors=72,
            sm_clock_mhz=1695,
            memory_clock_mhz=6251,
            l2_bytes=6 * MIB,
            rates=_rates(31.2, 62.5, 125.0, 600.0),  # NVIDIA A10 datasheet
            source=_query("12.8"),
        ),
        Card(
            target=_gpu("a10g", "NVIDIA A10G", (8, 6), 22_587 * MIB),
            multi_processors=80,
            sm_clock_mhz=1710,
            memory_clock_mhz=6251,
            l2_bytes=6 * MIB,
            rates=_rates(31.5, 35.0, 70.0, 600.0),  # NVIDIA A10G datasheet as Amazon EC2 hands it out (G5 instances)
            source="torch.cuda.get_device_properties, whole MiB",
        ),
        Card(
            target=_gpu("a100", "NVIDIA A100-SXM4-40GB", (8, 0), 42_298_834_944),
            multi_processors=108,
            sm_clock_mhz=1410,
            memory_clock_mhz=1215,
            l2_bytes=40 * MIB,
            rates=_rates(19.5, 156.0, 312.0, 1555.0),  # NVIDIA A100 datasheet, 40 GB
            source=f"{_xla('a100_sxm_40')}; github.com/bottlerocket-os/bottlerocket/pull/3873",
            aliases=("a100-40gb",),
        ),
        Card(
            target=_gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 85_100_068_864),
            multi_processors=108,
            sm_clock_mhz=1410,
            memory_clock_mhz=1593,
            l2_bytes=40 * MIB,
            rates=_rates(19.5, 156.0, 312.0, 2039.0),  # NVIDIA A100 datasheet, SXM
            source=_xla("a100_sxm_80"),
        ),
        Card(
            target=_gpu("a6000", "NVIDIA RTX A6000", (8, 6), 51_041_271_808),
            multi_processors=84,
            sm_clock_mhz=1800,
            memory_clock_mhz=8001,
            l2_bytes=6 * MIB,
            rates=_rates(38.7, 77.4, 154.8, 768.0),  # NVIDIA RTX A6000 datasheet; Ampere GA102 whitepaper, appendix A
            source=_xla("a6000"),
        ),
        Card(
            target=_gpu("l4", "NVIDIA L4", (8, 9), 23_612_293_120),
            multi_processors=58,
            sm_clock_mhz=2040,
            memory_clock_mhz=6251,
            l2_bytes=48 * MIB,
            rates=_rates(30.3, 60.0, 121.0, 300.0),  # NVIDIA L4 datasheet
            source=_query("12.0"),
        ),
        Card(
            target=_gpu("l40s", "NVIDIA L40S", (8, 9), 47_576_711_168),
            multi_processors=142,
            sm_clock_mhz=2520,
            memory_clock_mhz=9001,
            l2_bytes=96 * MIB,
            rates=_rates(91.6, 183.0, 362.0, 864.0),  # NVIDIA L40S datasheet
            source=_query("12.4"),
        ),
        Card(
            target=_gpu("h100", "NVIDIA H100 80GB HBM3", (9, 0), 84_942_979_072),
            multi_processors=132,
            sm_clock_mhz=1980,
            memory_clock_mhz=2619,
            l2_bytes=50 * MIB,
            rates=_rates(67.0, 494.0, 989.0, 3350.0),  # NVIDIA H100 datasheet, SXM
            reached=_H100,
            source=_xla("h100_sxm"),
            aliases=("h100-sxm", "h100-80gb"),
        ),
        Card(
            target=_gpu("h100-pcie", "NVIDIA H100 PCIe", (9, 0), 84_942_979_072),
            multi_processors=114,
            sm_clock_mhz=1755,
            memory_clock_mhz=1593,
            l2_bytes=50 * MIB,
            rates=_rates(51.0, 378.0, 756.0, 2000.0),  # NVIDIA H100 datasheet, PCIe
            source=_xla("h100_pcie"),
        ),
        Card(
            target=_gpu("h100-nvl", "NVIDIA H100 NVL", (9, 0), 99_456_909_312),
            multi_processors=132,
            sm_clock_mhz=1785,
            memory_clock_mhz=2619,
            l2_bytes=60 * MIB,
            rates=_rates(60.0, 417.5, 835.5, 3900.0),  # NVIDIA H100 datasheet, NVL
            source="torch.cuda.get_device_properties, CUDA 12.4; other machines report up to 93.1 GiB",
        ),
        Card(
            target=_gpu("h200", "NVIDIA H200", (9, 0), 150_110_011_392),
            multi_processors=132,
            sm_clock_mhz=1980,
            memory_clock_mhz=3201,
            l2_bytes=60 * MIB,
            rates=_rates(67.0, 494.0, 989.0, 4800.0),  # NVIDIA H200 datasheet, SXM
            source="torch.cuda.get_device_properties; torch's out-of-memory messages say 139.80 GiB",
        ),
        Card(
            target=_gpu("b200", "NVIDIA B200", (10, 0), 191_514_411_008),
            multi_processors=148,
            sm_clock_mhz=1965,
            memory_clock_mhz=3996,
            l2_bytes=132_644_864,
            rates=_rates(80.0, 1100.0, 2250.0, 8000.0),  # NVIDIA Blackwell architecture technical brief, HGX B200
            source=_xla("b200"),
        ),
        Card(
            target=_gpu("gh200", "NVIDIA GH200 120GB", (9, 0), 101_468_602_368),
            multi_processors=132,
            sm_clock_mhz=1980,
            memory_clock_mhz=2619,
            l2_bytes=60 * MIB,
            rates=_rates(67.0, 494.0, 989.0, 4000.0),  # NVIDIA GH200 datasheet, HBM3
            source=f"{_query('12.9')}; the 96 GB HBM3 model",
            aliases=("gh200-96gb", "gh200-480gb"),
        ),
    )
}
"""Every target known by name."""
