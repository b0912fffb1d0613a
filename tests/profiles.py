"""Small profiles made by hand, for tests of everything that works on records alone.

`make_profile` fills in what a test does not care about; `Log` writes a profile the way a run would, event by event;
`small_profile`, `deep_profile` and the hypothesis strategy `profiles` are ready-made ones. None of them needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

from fxmem.hardware.context import give_room
from fxmem.memory.liveness import node_live_bytes, node_scratch_bytes
from fxmem.records.profile import (
    Assumption,
    InputTensor,
    Kind,
    Node,
    Op,
    Phase,
    PhaseSpan,
    Profile,
    SourceLine,
    Step,
    Storage,
    Target,
    TensorInfo,
    Unknown,
)

CPU = Target(name="cpu", device="cpu", full_name="CPU")
TINY_CARD = give_room(Target(name="tiny", device="cuda", full_name="Tiny card", capability=(9, 0)), 1 << 30)
"""A CUDA context leaves 1 GiB of it."""
TRAINING = Step(mode="train", optimizer="AdamW", loss="sum of the output", precision=None)


def make_profile(
    *,
    ticks: int,
    storages: Sequence[Storage] = (),
    nodes: Sequence[Node] = (),
    ops: Sequence[Op] = (),
    phases: Sequence[PhaseSpan] | None = None,
    **fields: Any,
) -> Profile:
    """A profile with the given parts. Without `phases` it is all forward; `saved_bytes` is the sum over the nodes."""
    if phases is None:
        phases = [PhaseSpan(phase=Phase.FORWARD, begin=0, end=ticks, first_op=0, last_op=len(ops))]
    defaults: dict[str, Any] = {
        "fxmem_version": "0",
        "torch_version": "2.11.0",
        "model": "Toy",
        "inputs": (),
        "step": TRAINING,
        "target": CPU,
        "saved_bytes": sum(node.saved_bytes for node in nodes),
    }
    return Profile(
        ticks=ticks,
        phases=tuple(phases),
        nodes=tuple(nodes),
        ops=tuple(ops),
        storages=tuple(storages),
        **{**defaults, **fields},
    )


class Log:
    """Writes a profile as a run would: storages come and go one event at a time, ops claim the ticks they allocate at.

    Tick 0 is what is there before the step; the first event is tick 1.
    """

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self._tick = 1
        self._storages: list[Storage] = []
        self._nodes: list[Node] = []
        self._ops: list[Op] = []
        self._phases: list[PhaseSpan] = []

    def resident(
        self,
        nbytes: int,
        kind: Kind,
        *,
        name: str = "",
        node: int | None = None,
        shape: tuple[int, ...] = (),
        dtype: str = "float32",
    ) -> int:
        """A storage that is there before the step; its index."""
        return self._add(
            Storage(nbytes=nbytes, kind=kind, birth=0, death=0, node=node, name=name, shape=shape, dtype=dtype)
        )

    def node(self, name: str, **fields: Any) -> int:
        """A node; its index. `op` defaults to `call_module` and `target` to the name."""
        self._nodes.append(Node(**{"name": name, "op": "call_module", "target": name, **fields}))
        return len(self._nodes) - 1

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Everything inside happens in this phase."""
        begin, first_op = self._tick, len(self._ops)
        yield
        self._phases.append(
            PhaseSpan(phase=phase, begin=begin, end=self._tick, first_op=first_op, last_op=len(self._ops))
        )

    @contextmanager
    def op(
        self,
        name: str,
        node: int,
        phase: Phase,
        *,
        flops: int | None = 0,
        moved_bytes: int | None = None,
        **fields: Any,
    ) -> Iterator[None]:
        """An op; storages allocated inside belong to it."""
        index, begin = len(self._ops), self._tick
        self._ops.append(
            Op(
                name=name,
                node=node,
                phase=phase,
                begin=begin,
                end=begin,
                flops=flops,
                moved_bytes=moved_bytes,
                **fields,
            )
        )
        yield
        self._ops[index] = self._ops[index].model_copy(update={"end": self._tick})

    def allocate(
        self, nbytes: int, kind: Kind, *, shape: tuple[int, ...] = (), dtype: str = "float32", name: str = ""
    ) -> int:
        """A storage of the op that is running; its index."""
        op = len(self._ops) - 1
        birth = self._advance()
        return self._add(
            Storage(
                nbytes=nbytes,
                kind=kind,
                birth=birth,
                death=0,
                op=op,
                node=self._ops[op].node,
                shape=shape,
                dtype=dtype,
                name=name,
            )
        )

    def free(self, *storages: int) -> None:
        """These go, one event each."""
        for index in storages:
            self._storages[index] = self._storages[index].model_copy(update={"death": self._advance()})

    def profile(self) -> Profile:
        """What was written, `live_bytes` and `scratch_bytes` filled in; storages never freed live until the end."""
        storages = [s if s.death else s.model_copy(update={"death": self._tick}) for s in self._storages]
        profile = make_profile(
            ticks=self._tick, storages=storages, nodes=self._nodes, ops=self._ops, phases=self._phases, **self._fields
        )
        annotations = zip(profile.nodes, node_live_bytes(profile), node_scratch_bytes(profile), strict=True)
        nodes = tuple(
            node.model_copy(update={"live_bytes": live, "scratch_bytes": scratch})
            for node, live, scratch in annotations
        )
        return profile.model_copy(update={"nodes": nodes})

    def _advance(self) -> int:
        self._tick += 1
        return self._tick - 1

    def _add(self, storage: Storage) -> int:
        self._storages.append(storage)
        return len(self._storages) - 1


def small_profile(**fields: Any) -> Profile:
    """A training step of `head(relu(block(x)) + x)` with sizes a person can add up, in MiB.

    Its peak is in backward, when the gradient of `block.conv` is computed with a workspace of 64 MiB.
    """
    mib = 1 << 20
    line = SourceLine(file="/home/user/project/model.py", line=17, function="forward", code="x = self.conv(x)")
    head_line = line.model_copy(update={"line": 31, "code": "return self.head(x + y)"})
    image = TensorInfo(shape=(8, 16, 64, 64), dtype="float32", storage=2)
    log = Log(
        **{
            "model": "Small",
            "target": TINY_CARD,
            "inputs": (InputTensor(name="x", shape=(8, 16, 64, 64), dtype="float32"),),
            "modules": {"": "Small", "block": "Block", "block.conv": "Conv2d", "block.act": "Swish"},
            "assumptions": (
                Assumption(
                    topic="step",
                    text=(
                        "steady state: the optimizer's state exists, gradients are set to None after each step, and "
                        "the output lives until the step returns"
                    ),
                ),
                Assumption(topic="workspace", text="cuDNN chooses the plan its heuristic ranks first"),
            ),
            "unknowns": (Unknown(topic="flops", what="custom::swish", count=2),),
            **fields,
        }
    )
    weight = log.resident(2 * mib, Kind.PARAMETER, name="block.conv.weight", node=1, shape=(512, 1024))
    state = log.resident(4 * mib, Kind.OPTIMIZER_STATE, name="block.conv.weight.exp_avg", shape=(512, 1024))
    x = log.resident(32 * mib, Kind.INPUT, name="x", node=0, shape=(8, 16, 64, 64))
    log.node("x", op="placeholder", outputs=(image,))
    conv = log.node(
        "block_conv", target="block.conv", module="block.conv", module_type="Conv2d", source=line, inputs=(0,),
        outputs=(TensorInfo(shape=(8, 16, 64, 64), dtype="float32", storage=3),), params_bytes=2 * mib,
        output_bytes=32 * mib, saved_bytes=32 * mib, saved=(3,), forward_flops=3_000_000_000,
        backward_flops=6_000_000_000,
    )  # fmt: skip
    relu = log.node(
        "block_act", target="block.act", module="block.act", module_type="Swish",
        source=line.model_copy(update={"line": 18, "code": "x = self.act(x)"}), inputs=(conv,),
        outputs=(TensorInfo(shape=(8, 16, 64, 64), dtype="float32", storage=5),), output_bytes=32 * mib,
        saved_bytes=32 * mib, saved=(5,), forward_flops=None, backward_flops=None,
    )  # fmt: skip
    add = log.node(
        "add", op="call_function", target="operator.add", module="", module_type="Small", source=head_line,
        inputs=(relu, 0), outputs=(TensorInfo(shape=(8, 16, 64, 64), dtype="float32", storage=6),),
        output_bytes=32 * mib, forward_flops=0, backward_flops=0,
    )  # fmt: skip
    loss = log.node(
        "loss", op="loss", target="sum", module="", inputs=(add,), output_bytes=4, forward_flops=0, backward_flops=0
    )
    step = log.node("optimizer", op="optimizer", target="AdamW", module="", forward_flops=0)
    shape = (8, 16, 64, 64)
    with log.phase(Phase.FORWARD):
        with log.op("aten.convolution.default", conv, Phase.FORWARD, flops=3_000_000_000):
            y = log.allocate(32 * mib, Kind.SAVED, shape=shape)
            workspace = log.allocate(48 * mib, Kind.WORKSPACE, dtype="")
            log.free(workspace)
        with log.op("custom.swish.default", relu, Phase.FORWARD, flops=None):
            z = log.allocate(32 * mib, Kind.SAVED, shape=shape)
        with log.op("aten.add.Tensor", add, Phase.FORWARD):
            out = log.allocate(32 * mib, Kind.OUTPUT, shape=shape)
        with log.op("aten.sum.default", loss, Phase.FORWARD):
            log.allocate(4, Kind.OUTPUT)
    with log.phase(Phase.BACKWARD):
        with log.op("aten.expand.default", loss, Phase.BACKWARD):
            grad = log.allocate(32 * mib, Kind.TEMPORARY, shape=shape)
        with log.op("custom.swish_backward.default", relu, Phase.BACKWARD, flops=None):
            grad_y = log.allocate(32 * mib, Kind.TEMPORARY, shape=shape)
        log.free(grad, z)
        with log.op("aten.convolution_backward.default", conv, Phase.BACKWARD, flops=6_000_000_000):
            grad_w = log.allocate(2 * mib, Kind.GRADIENT, shape=(512, 1024), name="block.conv.weight")
            workspace = log.allocate(64 * mib, Kind.WORKSPACE, dtype="")
            log.free(workspace)
        log.free(grad_y, y)
    with log.phase(Phase.OPTIMIZER):
        with log.op("aten._foreach_mul.Scalar", step, Phase.OPTIMIZER):
            temporary = log.allocate(2 * mib, Kind.TEMPORARY, shape=(512, 1024))
        log.free(temporary, grad_w)
    assert (weight, state, x, out) == (0, 1, 2, 6)
    return log.profile()


def deep_profile(layers: int, **fields: Any) -> Profile:
    """A training step of `layers` equal blocks of four calls each (norm, linear, gelu, add): `4 * layers + 1` nodes."""
    parts = {"": "Block", ".norm": "LayerNorm", ".linear": "Linear", ".act": "GELU"}
    blocks = {f"layers.{layer}{part}": class_name for layer in range(layers) for part, class_name in parts.items()}
    modules = {"": "Deep", "layers": "ModuleList", **blocks}
    log = Log(
        **{
            "model": "Deep",
            "target": TINY_CARD,
            "inputs": (InputTensor(name="x", shape=(4, 256), dtype="float32"),),
            "modules": modules,
            **fields,
        }
    )
    line = SourceLine(
        file="/home/user/project/deep.py",
        line=40,
        function="forward",
        code="return x + self.act(self.linear(self.norm(x)))",
    )
    shape = (4, 256)
    kept: list[tuple[int, int]] = []
    for layer in range(layers):
        log.resident(262144, Kind.PARAMETER, name=f"layers.{layer}.linear.weight", node=4 * layer + 1, shape=(256, 256))
    with log.phase(Phase.FORWARD):
        for layer in range(layers):
            path = f"layers.{layer}"
            for name, module_type, nbytes in (
                ("norm", "LayerNorm", 4096),
                ("linear", "Linear", 4096),
                ("act", "GELU", 4096),
                ("add", "", 4096),
            ):
                is_add = name == "add"
                node = log.node(
                    f"layers_{layer}_{name}", op="call_function" if is_add else "call_module",
                    target="operator.add" if is_add else f"{path}.{name}", module=path if is_add else f"{path}.{name}",
                    module_type="Block" if is_add else module_type, source=line,
                    params_bytes=262144 if name == "linear" else 0, output_bytes=nbytes,
                    saved_bytes=0 if is_add else nbytes,
                    outputs=(TensorInfo(shape=shape, dtype="float32", storage=None),),
                    forward_flops=524288 if name == "linear" else 0, backward_flops=1048576 if name == "linear" else 0,
                )  # fmt: skip
                with log.op(f"aten.{name}.default", node, Phase.FORWARD):
                    kept.append((node, log.allocate(nbytes, Kind.SAVED, shape=shape)))
        loss = log.node("loss", op="loss", target="sum", forward_flops=0)
        with log.op("aten.sum.default", loss, Phase.FORWARD):
            log.allocate(4, Kind.OUTPUT)
    with log.phase(Phase.BACKWARD):
        for node, storage in reversed(kept):
            with log.op("aten.mul.Tensor", node, Phase.BACKWARD):
                grad = log.allocate(4096, Kind.TEMPORARY, shape=shape)
            log.free(grad, storage)
    return log.profile()


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any consistent profile of a few nodes: ops in order with gaps and empty ones among them, storages anywhere."""
    nodes = [Node(name=f"n{i}", op="call_function", target=f"f{i}") for i in range(draw(st.integers(1, 4)))]
    ops: list[Op] = []
    phases: list[PhaseSpan] = []
    tick = 0
    for phase in draw(st.sampled_from([(Phase.FORWARD,), (Phase.FORWARD, Phase.BACKWARD), tuple(Phase)])):
        begin, first_op = tick, len(ops)
        for _ in range(draw(st.integers(0, 5))):
            start = tick + draw(st.integers(0, 2))
            tick = start + draw(st.integers(0, 3))
            ops.append(Op(name="aten.f", node=draw(st.integers(0, len(nodes) - 1)), phase=phase, begin=start, end=tick))
        tick += draw(st.integers(0, 2))
        phases.append(PhaseSpan(phase=phase, begin=begin, end=tick, first_op=first_op, last_op=len(ops)))
    storages = []
    for _ in range(draw(st.integers(0, 12))):
        birth = draw(st.integers(0, tick))
        death = draw(st.integers(birth, tick))
        op = next((i for i, o in enumerate(ops) if o.begin <= birth < o.end), None)
        kind = draw(st.sampled_from(list(Kind)))
        storages.append(
            Storage(
                nbytes=draw(st.integers(0, 50)),
                kind=kind,
                birth=birth,
                death=death,
                op=op,
                node=None if op is None else ops[op].node,
            )
        )
    return make_profile(ticks=tick, storages=storages, nodes=nodes, ops=ops, phases=phases)
