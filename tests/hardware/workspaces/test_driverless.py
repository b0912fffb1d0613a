"""Plans of convolutions as an H100 took them, beside what is answered here with no driver."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fxmem.hardware.catalogue import target
from fxmem.hardware.workspaces import ConvSignature, conv_workspaces, driverless, find_cudnn

FILE = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu" / "h100-plans-cudnn9.19.0.json.gz"
KEY = re.compile(
    r"(?P<op>\w+) (?P<x>\S+)@(?P<x_stride>\S+) (?P<w>\S+)@(?P<w_stride>\S+) (?P<y>\S+)@(?P<y_stride>\S+)"
    r" p(?P<padding>\S+) s(?P<stride>\S+) d(?P<dilation>\S+) g(?P<groups>\d+) (?P<dtype>\w+)"
    r" tf(?P<allow_tf32>\d) det(?P<deterministic>\d)"
)
NUMBERS = "x", "x_stride", "w", "w_stride", "y", "y_stride", "padding", "stride", "dilation"
MIB = 1 << 20


def read_signature(key: str) -> ConvSignature:
    match = KEY.fullmatch(key)
    assert match is not None
    fields: dict[str, Any] = match.groupdict()
    fields |= {name: tuple(int(number) for number in fields[name].split(".")) for name in NUMBERS}
    found = ConvSignature(
        **{**fields, "groups": int(fields["groups"]), "allow_tf32": fields["allow_tf32"] == "1",
           "deterministic": fields["deterministic"] == "1"}
    )  # fmt: skip
    assert found.key == key
    return found


def measured() -> dict[ConvSignature, int]:
    plans = json.loads(gzip.decompress(FILE.read_bytes()))["plans"]
    return {read_signature(key): nbytes for key, (_, nbytes) in list(plans.items())[::8]}


def is_here() -> bool:
    try:
        return find_cudnn().version == "9.19.0"
    except LookupError:
        return False


@pytest.mark.truth
@pytest.mark.skipif(not is_here(), reason="the card's plans are those of cuDNN 9.19")
def test_answers_are_those_of_the_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    truth = measured()

    def errors(folder: str) -> list[int]:
        monkeypatch.setenv("FXMEM_CACHE_DIR", str(tmp_path / folder))
        answers = conv_workspaces(truth, target("h100"))
        return [abs((answers[each].nbytes or 0) - nbytes) for each, nbytes in truth.items()]

    corrected = errors("corrected")
    monkeypatch.setattr(driverless, "correct_workspace", lambda signature, nbytes, knobs: nbytes)
    plain = errors("plain")
    assert len(truth) == 319
    assert sum(error >= 1024 for error in corrected) < 0.14 * len(truth) < 0.3 * sum(error >= 1024 for error in plain)
    assert sum(corrected) < 0.08 * sum(plain)


@pytest.mark.parametrize(
    ("key", "nbytes"),
    [
        # Engine 62: a product an image, in float32.
        ("wgrad 32.256.56.56@802816.3136.56.1 128.256.1.1@256.1.1.1 32.128.56.56@401408.3136.56.1", 4_194_304),
        # Engine 58: one product.
        ("fwd 32.256.56.56@802816.3136.56.1 128.256.1.1@256.1.1.1 32.128.56.56@401408.3136.56.1", 0),
    ],
)
def test_point_convolutions_are_products_of_cublas(key: str, nbytes: int) -> None:
    signature = read_signature(f"{key} p0.0 s1.1 d1.1 g1 float32 tf1 det0")
    assert driverless.correct_workspace(signature, 123 * MIB, {}) == nbytes
    without_tensor_cores = signature.model_copy(update={"allow_tf32": False})
    assert driverless.correct_workspace(without_tensor_cores, 123 * MIB, {}) == 123 * MIB


def point_gradient(batch: int, channels: int, filters: int, op: str = "wgrad") -> ConvSignature:
    """Of a 1 x 1 convolution of images of 3 x 3."""
    sides = f"{batch}.{channels}.3.3@{channels * 9}.9.3.1 {filters}.{channels}.1.1@{channels}.1.1.1 "
    return read_signature(f"{op} {sides}{batch}.{filters}.3.3@{filters * 9}.9.3.1 p0.0 s1.1 d1.1 g1 float32 tf1 det0")


@pytest.mark.parametrize(
    ("signature", "seen", "at_most"),
    [
        (point_gradient(323, 320, 1280), 323 * 320 * 1280 * 4, 323 * 320 * 1280 * 4),
        (point_gradient(377, 320, 1280), None, None),  # more than 512 MiB
        (point_gradient(323, 192, 1152), None, 323 * 192 * 1152 * 4),
        (point_gradient(323, 320, 1280, "fwd"), None, None),
        (point_gradient(2, 320, 1280).model_copy(update={"allow_tf32": False}), None, 2 * 320 * 1280 * 4),
        (point_gradient(2, 320, 1280).model_copy(update={"groups": 2}), None, None),
    ],
)
def test_what_another_card_was_seen_to_hold(signature: ConvSignature, seen: int | None, at_most: int | None) -> None:
    seen_there = driverless.find_seen(target("rtx3060"), "2.6")
    assert seen_there is not None
    assert seen_there.rule(signature) == seen
    assert driverless.GUESSES["cuBLASLt's for all 1 x 1"](signature) == at_most
    assert driverless.GUESSES["no workspaces"](signature) == 0


@pytest.mark.parametrize(
    ("op", "channels", "size", "nbytes"),
    [
        # Engines 3, 50 and 17 of an H100, asked one by one.
        ("fwd", 512, 7, 7),
        ("fwd", 512, 14, 651_165_696),
        ("fwd", 512, 28, 2_433_744_896),
        ("fwd", 256, 56, 2_493_775_872),
        ("fwd", 128, 112, 7),
        ("dgrad", 64, 56, 53_477_376),
        ("dgrad", 512, 28, 1_283_457_024),
        ("dgrad", 512, 14, 7),
        ("wgrad", 64, 224, 1_850_277_888),
        ("wgrad", 512, 7, 56_623_104),
    ],
)
def test_full_float32_is_transformed(op: str, channels: int, size: int, nbytes: int) -> None:
    image, plane = f"32.{channels}.{size}.{size}", size * size
    strides, window = f"{channels * plane}.{plane}.{size}.1", f"{channels}.{channels}.3.3@{9 * channels}.9.3.1"
    signature = read_signature(f"{op} {image}@{strides} {window} {image}@{strides} p1.1 s1.1 d1.1 g1 float32 tf0 det0")
    assert driverless.correct_workspace(signature, 7, {}) == nbytes


@pytest.mark.parametrize(
    ("batch", "changed", "nbytes"),
    [
        # The last convolution of a PSPNet, whose published peaks hold them: 2 and 4 images of 512 x 1024.
        (2, {}, 936 * MIB),
        (4, {}, 1584 * MIB),
        (2, {"w": (24, 4096, 3, 3)}, None),
        (2, {"x": (2, 4096, 4, 4)}, None),
        (2, {"op": "dgrad"}, None),
        (2, {"dtype": "float16"}, None),
        (2, {"dilation": (2, 2)}, None),
        (2, {"groups": 2}, None),
    ],
)
def test_v100s_transform_what_the_filter_s_gradient_reads(
    batch: int, changed: dict[str, Any], nbytes: int | None
) -> None:
    x, y = (f"{batch}.{n}.64.128@{n * 8192}.8192.128.1" for n in (4096, 512))
    key = f"wgrad {x} 512.4096.3.3@36864.9.3.1 {y} p1.1 s1.1 d1.1 g1 float32 tf1 det0"
    signature = read_signature(key).model_copy(update=changed)
    for release in ("2.6", "2.11"):
        seen = driverless.find_seen(target("v100"), release)
        assert seen is not None
        assert seen.rule(signature) == nbytes
    assert driverless.find_seen(target("t4"), "2.6") is None


def test_clusters_of_blocks_split_the_last_tiles() -> None:
    nhwc = "32.128.56.56@401408.1.7168.128 128.128.3.3@1152.1.384.128 32.128.28.28@100352.1.3584.128"
    backward = read_signature(f"wgrad {nhwc} p1.1 s2.2 d1.1 g1 float32 tf1 det0")
    knobs = {2: 0, 13: 0, 18: 1, 25: 0, 27: 1, 28: 1}
    # 9 tiles, 14 to each of which there are blocks on the card; 2 without a driver.
    assert abs(driverless.correct_workspace(backward, 1_179_843, knobs) - 8_258_199) < 1024
    assert driverless.correct_workspace(backward, 1_179_843, {**knobs, 25: 1}) == 1_179_843
