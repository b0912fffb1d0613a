"""A small program for each cause of `fxmem.memory.findings`, and a twin without it: `causing.py CAUSE on|off`."""

import contextlib
import copy
import functools
import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchvision.ops import box_iou

CAUSE, HAS = sys.argv[1], sys.argv[2] == "on"


def make_net(width: int = 256, layers: int = 6, out: int = 256) -> nn.Sequential:
    hidden = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*hidden, nn.Linear(width, out)).cuda()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(net: nn.Module, rows: int = 512, width: int = 256) -> torch.Tensor:
    loss = net(torch.randn(rows, width, device="cuda")).square().mean()
    loss.backward()
    return loss.detach()


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def unused_graph() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        train(net)
        step(optimizer)
        net.eval()
        with torch.set_grad_enabled(HAS):
            net(torch.randn(4096, 256, device="cuda")).argmax(-1)
        net.train()


def unused_graph_of_detached() -> None:
    """A generator's images are detached for the critic; the same serve for both, or new ones are made."""
    net, critic = make_net(), nn.Linear(256, 1).cuda()
    optimizer = torch.optim.SGD([*net.parameters(), *critic.parameters()])
    for _ in range(3):
        made = net(torch.randn(4096, 256, device="cuda"))
        critic(made.detach()).square().mean().backward()
        if HAS:
            made = net(torch.randn(4096, 256, device="cuda"))
        critic(made).square().mean().backward()
        step(optimizer)


def unused_graph_of_batches() -> None:
    """Each batch of a validation has the peak of the one before it."""
    net = nn.DataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        train(net)
        step(optimizer)
        net.eval()
        for _ in range(4):
            with torch.set_grad_enabled(HAS):
                out = net(torch.randn(4096, 256, device="cuda"))
            out.argmax(-1)
        net.train()


def unused_graph_of_validation() -> None:
    """After the last epoch, without which the steps before take the most."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    images = torch.randn(2048, 256)
    for batch in DataLoader(images, 512):
        net(batch.cuda()).square().mean().backward()
        step(optimizer)
    for batch in DataLoader(images, 512):
        with torch.set_grad_enabled(HAS):
            out = net(batch.cuda())
        out.argmax(-1)


def kept_results() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    kept = []
    for _ in range(20):
        out = net(torch.randn(512, 256, device="cuda"))
        out.square().mean().backward()
        step(optimizer)
        kept.append(out.detach() if HAS else out.detach().cpu())


def check(x: torch.Tensor) -> None:
    twice = x * 2
    raise ValueError(f"not what was expected: {tuple(twice.shape)}")


def kept_views() -> None:
    """A row of each result, all rows of each, and an error with the functions that it came through."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    first, rows, errors = [], [], []
    for _ in range(20):
        out = net(torch.randn(512, 256, device="cuda"))
        out.square().mean().backward()
        step(optimizer)
        first.append(out.detach()[:2])
        rows.append(list((out.detach() + 1).split(2)))
        try:
            check(torch.ones(512, 256, device="cuda"))
        except ValueError as error:
            errors.append(error)


def loader_workers() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    for (x,) in DataLoader(TensorDataset(torch.randn(4096, 256)), 512, num_workers=4 if HAS else 0):
        net(x.cuda()).square().mean().backward()
        step(optimizer)


def kept_results_of_evaluation() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    data = TensorDataset(torch.randn(5120, 256))
    for _ in range(2):
        for (x,) in DataLoader(data, batch_size=512):
            net(x.cuda()).square().mean().backward()
            step(optimizer)
        kept = []
        with torch.no_grad():
            for (x,) in DataLoader(data, batch_size=256):
                out = net(x.cuda())
                kept.append(out if HAS else out.cpu())
        kept.clear()


def whole_checkpoint() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        x = torch.randn(8192, 256, device="cuda")
        if HAS:
            x = checkpoint(net, x, use_reentrant=False)
        else:
            for block in net:
                x = checkpoint(block, x, use_reentrant=False)
        x.sum().backward()
        step(optimizer)


class Checkpointed(nn.Module):
    """As those of transformers, which checkpoint in train mode alone."""

    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x


def skipped_checkpoint() -> None:
    net = Checkpointed().train(not HAS)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        train(net, 4096)
        step(optimizer)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(256, 256)
        self.register_buffer("table", torch.ones(4096, 256), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not HAS:  # as a cache of keys is written to
            self.table[:1] = x.detach()[:1]
        return self.project(x * self.table[: len(x)])


def layer_buffers() -> None:
    net = nn.Sequential(*[Turned() for _ in range(6)]).cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        train(net, 64)
        step(optimizer)


def waiting_graphs() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        total = 0
        for _ in range(3):
            loss = net(torch.randn(4096, 256, device="cuda")).square().mean() / 3
            if HAS:
                total += loss
            else:
                loss.backward()
        if HAS:
            total.backward()
        step(optimizer)


def targets_of_each_other() -> None:
    """As of SimSiam: each loss needs what the other forward made, detached."""
    net, head = make_net(), nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()])
    for _ in range(3):
        one, other = (net(torch.randn(4096, 256, device="cuda")) for _ in range(2))
        first = F.mse_loss(head(one), other.detach())
        (first + F.mse_loss(head(other), one.detach())).backward()
        step(optimizer)


def target_of_the_one_before() -> None:
    """The second forward learns what the first gave: backward of the first may come before it."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        one = net(torch.randn(4096, 256, device="cuda"))
        first = one.square().mean()
        (first + F.mse_loss(net(torch.randn(4096, 256, device="cuda")), one.detach())).backward()
        step(optimizer)


def weights_twice() -> None:
    net = make_net(1024)
    optimizer = torch.optim.SGD(net.parameters())
    kept = {"model": copy.deepcopy(net.state_dict())} if HAS else {}
    for _ in range(3):
        train(net, 64, 1024)
        step(optimizer)
    kept.clear()


def weights_twice_of_checkpoint() -> None:
    """The checkpoint is on the card, and comes to the weights by way of the host."""
    net = make_net(1024).cpu()
    checkpoint = {name: each.cuda() if HAS else each.clone() for name, each in net.state_dict().items()}
    net.load_state_dict(checkpoint)
    net.cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        train(net, 64, 1024)
        step(optimizer)
    checkpoint.clear()


def trained_target() -> None:
    """Double Q-learning, whose target has a graph through the network that learns; without, where it is detached."""
    actor, target = make_net(128, 3, 8), make_net(128, 3, 8)
    optimizer = torch.optim.SGD(actor.parameters())
    for _ in range(3):
        now, later = torch.randn(2, 4096, 128, device="cuda").unbind()
        reward, goes_on = torch.randn(4096, 1, device="cuda"), torch.ones(4096, 1, device="cuda")
        with torch.no_grad():
            best = target(later).argmax(1, keepdim=True)
        with torch.set_grad_enabled(HAS):
            value = actor(later).gather(1, best)
        wanted = reward + 0.99 * value * goes_on
        F.mse_loss(actor(now).gather(1, best), wanted).backward()
        step(optimizer)


def other_targets() -> None:
    """Two views of an image that both train, and one that is scaled and moved by what is learned elsewhere."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        one, other = torch.randn(2, 4096, 256, device="cuda").unbind()
        scale, mean = torch.randn(2, 4096, 256, device="cuda").unbind()
        (F.mse_loss(net(one), net(other)) + F.mse_loss(net(one), (net(other) + mean) * scale)).backward()
        step(optimizer)


def wide_result_of_a_hook() -> None:
    """The gradient of each sample's weight, of all its tokens apart before they are added up, as opacus had it."""

    def add_up(layer: nn.Linear, _: object, grads: tuple[torch.Tensor, ...]) -> None:
        together = "n...i,n...j->nij"
        apart = together if not HAS else "n...i,n...j->n...ij"
        of_tokens = torch.einsum(apart, grads[0], layer.read)
        layer.weight.of_samples = of_tokens.sum(1) if HAS else of_tokens

    net = nn.Linear(256, 256).cuda()
    net.register_forward_pre_hook(lambda layer, args: setattr(layer, "read", args[0].detach()))
    net.register_full_backward_hook(add_up)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        net(torch.randn(8, 64, 256, device="cuda")).square().mean().backward()
        net.weight.of_samples = None
        step(optimizer)


def weights_twice_of_a_loop() -> None:
    """The variable of the loop over a checkpoint has the last of its tensors as well."""
    net = make_net(1024).cpu()
    checkpoint = {name: each.cuda() if HAS else each.clone() for name, each in net.state_dict().items()}
    for last in checkpoint.values():  # noqa: B007
        pass
    net.load_state_dict(checkpoint)
    net.cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        train(net, 64, 1024)
        step(optimizer)
    checkpoint.clear()
    del last


def flat_buffer() -> None:
    """As a rank of ZeRO-3 has its shard of the weights, and a buffer for its gradients."""
    shard = nn.Parameter(torch.randn(1 << 22, device="cuda"))
    optimizer, buffer = torch.optim.SGD([shard]), torch.zeros(1 << 22, device="cuda")
    for _ in range(3):
        (shard * 2).sum().backward()
        buffer.copy_(shard.grad)
        step(optimizer)


def late_zero_grad() -> None:
    net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 50_000)).cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        y = torch.zeros(1024, dtype=torch.int64, device="cuda")
        loss = F.cross_entropy(net(torch.randn(1024, 64, device="cuda")), y)
        if HAS:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not HAS:
            optimizer.zero_grad()


def broadcast_loss() -> None:
    net = make_net(64, 1, 1)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        predicted, y = net(torch.randn(4096, 64, device="cuda")), torch.randn(4096, device="cuda")
        F.mse_loss(predicted if HAS else predicted.squeeze(-1), y).backward()
        step(optimizer)


def autocast_copies() -> None:
    net = make_net(2048)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        for _ in range(2):  # gradients are there when the copies are
            with torch.autocast("cuda", torch.bfloat16, enabled=HAS):
                loss = net(torch.randn(64, 2048, device="cuda")).float().repeat(1, 1000).square().mean()
            loss.backward()
        step(optimizer)


def kept_output() -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8192)).cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        y = torch.zeros(4096, dtype=torch.int64, device="cuda")
        out = net(torch.randn(4096, 64, device="cuda"))
        loss = F.cross_entropy(out, y)
        if not HAS:
            del out
        loss.backward()
        step(optimizer)


def kept_output_of_a_layer() -> None:
    net = nn.Linear(64, 8192).cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        out = net(torch.randn(4096, 64, device="cuda"))
        loss = F.cross_entropy(out, torch.zeros(4096, dtype=torch.int64, device="cuda"))
        if not HAS:
            del out
        loss.backward()
        step(optimizer)


def kept_output_of_accumulation() -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8192)).cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        for _ in range(2):
            out = net(torch.randn(4096, 64, device="cuda"))
            loss = F.cross_entropy(out, torch.zeros(4096, dtype=torch.int64, device="cuda"))
            if not HAS:
                del out
            loss.backward()
        step(optimizer)


def kept_output_of_preferences() -> None:
    """As DPO: the reference's own logits come while the policy's are there, of which the probabilities are used."""
    net, reference = (nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8192)).cuda() for _ in range(2))
    optimizer = torch.optim.SGD(net.parameters())
    y = torch.zeros(4096, 1, dtype=torch.int64, device="cuda")
    for _ in range(3):
        x = torch.randn(4096, 64, device="cuda")
        logits = net(x)
        own = logits.log_softmax(-1).gather(1, y)
        if not HAS:
            del logits
        with torch.no_grad():
            other = reference(x).log_softmax(-1).gather(1, y)
        (own - other).mean().backward()
        step(optimizer)


def reentrant_checkpoint() -> None:
    net, head = make_net(), nn.Linear(256, 10).cuda()
    optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()])
    for _ in range(3):
        x = torch.randn(64, 256, device="cuda")
        for block in net:
            x = checkpoint(block, x, use_reentrant=HAS)
        head(x).sum().backward()
        step(optimizer)


def math_attention() -> None:
    dtype = torch.float64 if HAS else torch.float32  # which no fused kernel takes
    project = nn.Linear(64, 192, dtype=dtype).cuda()
    optimizer = torch.optim.SGD(project.parameters())
    for _ in range(3):
        q, k, v = project(torch.randn(2, 8, 512, 64, device="cuda", dtype=dtype)).chunk(3, -1)
        F.scaled_dot_product_attention(q, k, v).sum().backward()
        step(optimizer)


def math_attention_of_weights() -> None:
    attention = nn.MultiheadAttention(64, 8, batch_first=True).cuda()
    optimizer = torch.optim.SGD(attention.parameters())
    for _ in range(3):
        x = torch.randn(2, 512, 64, device="cuda")
        attention(x, x, x, need_weights=HAS)[0].square().mean().backward()
        step(optimizer)


def math_attention_of_products() -> None:
    """The twin reads the weights, as a loss of their entropy does."""
    project = nn.Linear(64, 192).cuda()
    optimizer = torch.optim.SGD(project.parameters())
    for _ in range(3):
        q, k, v = project(torch.randn(2, 8, 512, 64, device="cuda")).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) / 8
        weights = scores.masked_fill(torch.ones(512, 512, device="cuda").triu(1) > 0, -1e9).softmax(-1)
        loss = (F.dropout(weights, 0.1) @ v).square().mean()
        del scores
        if not HAS:
            loss = loss + weights.square().mean()
        loss.backward()
        step(optimizer)


def math_attention_of_places() -> None:
    """The twin adds scores of the places, which are as many, and shifted as Transformer-XL does."""
    project, places = nn.Linear(64, 192).cuda(), torch.randn(512, 64, device="cuda")
    optimizer = torch.optim.SGD(project.parameters())
    for _ in range(3):
        q, k, v = project(torch.randn(2, 8, 512, 64, device="cuda")).chunk(3, -1)
        of_places = q @ places.T
        padded = torch.cat([of_places.new_zeros(2, 8, 512, 1), of_places], -1).view(2, 8, 513, 512)
        scores = q @ k.transpose(-2, -1) + (torch.zeros(512, 512, device="cuda") if HAS else padded[:, :, 1:])
        del of_places, padded
        (scores.softmax(-1) @ v).square().mean().backward()
        step(optimizer)


def math_attention_of_scores() -> None:
    """The twin adds a layer's scores to those of the next."""
    layers = [nn.Linear(64, 192).cuda() for _ in range(2)]
    optimizer = torch.optim.SGD([each for layer in layers for each in layer.parameters()])
    for _ in range(3):
        x, former = torch.randn(2, 8, 512, 64, device="cuda"), torch.zeros(2, 8, 512, 512, device="cuda")
        for layer in layers:
            q, k, v = layer(x).chunk(3, -1)
            scores = q @ k.transpose(-2, -1) / 8 + former
            former = former if HAS else scores
            x = scores.softmax(-1) @ v
        x.square().mean().backward()
        step(optimizer)


def optimizer_state() -> None:
    net = make_net(32_000, 5, 32_000)
    optimizer = torch.optim.AdamW(net.parameters()) if HAS else torch.optim.SGD(net.parameters())
    for _ in range(3):
        net(torch.randn(64, 32_000, device="cuda")).sum().backward()
        step(optimizer)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux = make_net(), nn.Linear(256, 4096) if HAS else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).sum()


def unused_parameters() -> None:
    net = TwoHeads().cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        net(torch.randn(64, 256, device="cuda")).backward()
        step(optimizer)


def unstepped_gradients() -> None:
    net, head = make_net(1024), nn.Linear(256, 10).cuda()
    net.requires_grad_(HAS)
    optimizer = torch.optim.AdamW(head.parameters())
    for _ in range(3):
        head(net(torch.randn(64, 1024, device="cuda"))).sum().backward()
        step(optimizer)


def unstepped_gradients_of_a_teacher() -> None:
    teacher, net = make_net(), make_net()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        x = torch.randn(4096, 256, device="cuda")
        with torch.set_grad_enabled(HAS):
            target = teacher(x)
        F.kl_div(net(x).log_softmax(-1), target.softmax(-1), reduction="batchmean").backward()
        step(optimizer)


def unstepped_gradients_of_a_generator() -> None:
    """The critic's backward goes through the generator as well: its gradients are freed before its own backward, with
    those that it has stepped with."""
    generator, critic = make_net(), make_net()
    of_generator, of_critic = (torch.optim.SGD(each.parameters()) for each in (generator, critic))
    for _ in range(3):
        x = torch.randn(4096, 256, device="cuda")
        with torch.set_grad_enabled(HAS):
            made = generator(x)
        (critic(x) - critic(made)).mean().backward()
        step(of_critic)
        generator.zero_grad()
        critic(generator(x)).mean().backward()
        of_generator.step()
        critic.zero_grad()


def generator_of_both() -> None:
    """One forward of the generator serves both backwards."""
    generator, critic = make_net(), make_net()
    of_generator, of_critic = (torch.optim.SGD(each.parameters()) for each in (generator, critic))
    for _ in range(3):
        made = generator(torch.randn(4096, 256, device="cuda"))
        critic(made).mean().backward(retain_graph=True)
        step(of_critic)
        generator.zero_grad()
        critic.requires_grad_(False)
        critic(made).mean().backward()
        critic.requires_grad_()
        step(of_generator)


def generator_that_accumulates() -> None:
    """The generator steps with the gradients of the critic's backward, too."""
    generator, critic = make_net(), make_net()
    of_generator, of_critic = (torch.optim.SGD(each.parameters()) for each in (generator, critic))
    for _ in range(3):
        made = generator(torch.randn(4096, 256, device="cuda"))
        critic(made).mean().backward()
        step(of_critic)
        critic(generator(torch.randn(4096, 256, device="cuda"))).mean().backward()
        step(of_generator)
        critic.zero_grad()


def master_copies() -> None:
    """As guided-diffusion trains in float16: the optimizer has flat copies that the gradients are copied to."""
    net = make_net(1024).half()
    masters = [nn.Parameter(torch.cat([each.detach().flatten() for each in net.parameters()]).float())]
    optimizer = torch.optim.AdamW(masters)
    for _ in range(3):
        net(torch.randn(64, 1024, device="cuda").half()).sum().backward()
        masters[0].grad = torch.cat([each.grad.flatten() for each in net.parameters()]).float()
        step(optimizer)
        for each in net.parameters():
            each.grad.zero_()


def clipped_together() -> None:
    """A norm over all gradients: those that nobody steps decide how far the others go."""
    net, head = make_net(1024), nn.Linear(256, 10).cuda()
    optimizer = torch.optim.AdamW(head.parameters())
    for _ in range(3):
        head(net(torch.randn(64, 1024, device="cuda"))).sum().backward()
        nn.utils.clip_grad_norm_([*net.parameters(), *head.parameters()], 1.0)
        step(optimizer)


def master_module() -> None:
    """As apex's O2 has float32 masters of a half model, which a hook of each parameter or the loop fills."""
    net = make_net(1024).half()
    masters = copy.deepcopy(net).float()
    optimizer = torch.optim.AdamW(masters.parameters())
    for _ in range(3):
        net(torch.randn(64, 1024, device="cuda").half()).float().sum().backward()
        for master, each in zip(masters.parameters(), net.parameters(), strict=True):
            master.grad, each.grad = each.grad.float(), None
        step(optimizer)


@functools.lru_cache
def count(net: nn.Module) -> int:
    return len([*net.parameters()])


def folds() -> None:
    """A cached function keeps the model of each fold, with gradients that no optimizer steps any more."""
    for _ in range(3):
        net = make_net(1024)
        optimizer = torch.optim.AdamW(net.parameters())
        optimizer.zero_grad()
        train(net, 64, 1024)
        optimizer.step()
        count(net)


def functional_gradient() -> None:
    """The backward is within torch.func: without gradients for the call there are none at all."""
    net = make_net()
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters())
    per_sample = torch.func.vmap(torch.func.grad(lambda p, x: loss_of(net, p, x[None])), (None, 0))
    for _ in range(3):
        x = torch.randn(512, 256, device="cuda")
        gradients = torch.func.grad(lambda p, x: loss_of(net, p, x))(parameters, x)
        rows = per_sample(parameters, x[:4])
        for name, each in net.named_parameters():
            each.grad = (gradients[name] + rows[name].mean(0)).detach()
        step(optimizer)


def loss_of(net: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(net, parameters, (x,)).square().mean()


def late_backward() -> None:
    """The backward of a step's loss comes in the next step."""
    net, last = make_net(), None
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(5):
        loss = net(torch.randn(4096, 256, device="cuda")).square().mean()
        if last is not None:
            last.backward()
            step(optimizer)
        last = loss
        del loss


def shared_line() -> None:
    """Training and validation call the model at one line: `no_grad` there would end the training."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        for rows in (512, 4096):
            out = net(torch.randn(rows, 256, device="cuda"))
            if rows == 512:
                out.square().mean().backward()
        step(optimizer)


def cast_in_place() -> None:
    """Weights cast in place, of which a loop's variable has the last, and activations of their shapes in a list."""
    net, kept = make_net(1024, 1, 1024), []
    optimizer = torch.optim.SGD(net.parameters())
    for each in net.parameters():
        each.data = each.data.half().float()
    for number in range(3):
        x = net[0][0](torch.randn(1024, 1024, device="cuda"))
        if number == 0:
            kept += [x.detach(), net[1](x).detach()]
        net[1](x).square().mean().backward()
        step(optimizer)


def average_of_weights() -> None:
    net = make_net(1024)
    optimizer = torch.optim.SGD(net.parameters())
    average = [each.detach().clone() for each in net.parameters()]
    for _ in range(3):
        train(net, 64, 1024)
        step(optimizer)
        torch._foreach_lerp_(average, [each.detach() for each in net.parameters()], 0.1)


def adversarial_input() -> None:
    """The gradient of the input is what the program is after."""
    net, head = make_net().requires_grad_(False), nn.Linear(256, 10).cuda()
    optimizer = torch.optim.AdamW(head.parameters())
    for _ in range(3):
        x = torch.randn(4096, 256, device="cuda", requires_grad=True)
        head(net(x)).sum().backward()
        x.grad.sign()
        step(optimizer)


def metric_after_the_step() -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8192)).cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        y = torch.zeros(4096, dtype=torch.int64, device="cuda")
        out = net(torch.randn(4096, 64, device="cuda"))
        F.cross_entropy(out, y).backward()
        step(optimizer)
        (out.argmax(-1) == y).sum().item()


def frozen_saves() -> None:
    net, head = make_net().requires_grad_(False), nn.Linear(256, 10).cuda()
    optimizer = torch.optim.AdamW(head.parameters())
    for _ in range(3):
        x = torch.randn(4096, 256, device="cuda", requires_grad=HAS)
        head(net(x)).sum().backward()
        step(optimizer)


def wide_result() -> None:
    net = make_net(64, 1, 8)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        x = net(torch.randn(4096, 64, device="cuda"))
        torch.cdist(x, x if HAS else x[:16]).mean().backward()
        step(optimizer)


def wide_result_of_boxes() -> None:
    net = make_net(64, 1, 4)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        boxes = net(torch.randn(4096, 64, device="cuda"))
        pairs = box_iou(boxes.detach(), boxes.detach()[: 4096 if HAS else 4])
        (boxes.square().mean() + pairs.mean()).backward()
        step(optimizer)


def wide_result_of_thresholds() -> None:
    """As torchmetrics' curve of precision and recall: the first result is of one byte each."""
    net = make_net()
    thresholds = torch.linspace(0, 1, 200 if HAS else 4, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            scores = net(torch.randn(4096, 256, device="cuda")).sigmoid().flatten()
            (scores.unsqueeze(-1) >= thresholds).long().sum(0)


def wide_result_of_diagonal() -> None:
    """As torchmetrics' perplexity: each row's probabilities of all targets, for those of its own."""
    net = make_net()
    with torch.no_grad():
        for _ in range(3):
            target = torch.randint(256, (8192,), device="cuda")
            found = net(torch.randn(8192, 256, device="cuda"))
            own = found[:, target].diagonal() if HAS else found[torch.arange(8192, device="cuda"), target]
            own.sum()


class Activation(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "silu":
            return x * torch.sigmoid(x) if HAS else F.silu(x)
        if self.kind == "mish":
            return x * torch.tanh(F.softplus(x)) if HAS else F.mish(x)
        if self.kind == "gelu":
            return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))) if HAS else F.gelu(x)
        if self.kind == "tanh":
            inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)) if HAS else x
            return 0.5 * x * (1.0 + torch.tanh(inner)) if HAS else F.gelu(x, approximate="tanh")
        if self.kind == "gate":
            return x.roll(1, 0) * torch.sigmoid(x)
        if self.kind == "other":
            return 0.5 * x * (1.0 + torch.erf(x / 3.0))
        if self.kind == "thrice":
            return 1.5 * x * (1.0 + torch.erf(x / 1.4142))
        return x * torch.sigmoid(1.702 * x)


def written_activation(kind: str = "silu") -> None:
    layers = [nn.Sequential(nn.Linear(256, 256), Activation(kind)) for _ in range(6)]
    net = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        train(net, 4096)
        step(optimizer)


written_activation_of_mish = functools.partial(written_activation, "mish")
written_activation_of_gelu = functools.partial(written_activation, "gelu")
written_activation_of_tanh = functools.partial(written_activation, "tanh")
other_gate = functools.partial(written_activation, "gate")
quick_gelu = functools.partial(written_activation, "quick")
triple_gelu = functools.partial(written_activation, "thrice")
other_gelu = functools.partial(written_activation, "other")


def kept_results_of_create_graph() -> None:
    """A gradient penalty: parameter, gradient and graph are a cycle that no collector frees."""
    net = make_net(512)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(8):
        x = torch.randn(4096, 512, device="cuda", requires_grad=True)
        if HAS:
            net(x).sum().backward(create_graph=True)
            gradient = x.grad
        else:
            (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        (gradient.norm(dim=1) - 1).square().mean().backward()
        step(optimizer)


def kept_input_gradients() -> None:
    """Nothing is sharded: gradients that no parameter has are those of inputs."""
    net, kept = make_net(), []
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(6):
        x = torch.randn(4096, 256, device="cuda", requires_grad=True)
        net(x).square().mean().backward()
        kept.append(x)
        step(optimizer)


def other_cycle() -> None:
    """Gradients of gradients are wanted once; what grows is of a hook that keeps a node's own result."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    net(x).mean().backward(create_graph=True)
    x.grad = None
    step(optimizer)
    for _ in range(6):
        train(net)
        step(optimizer)
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
            net(torch.randn(4096, 256, device="cuda")).exp()


def ddp_buckets_of_frozen() -> None:
    """As the target of I-JEPA, which is wrapped and then frozen."""
    dist.init_process_group("nccl")
    net = make_net(1024)
    target = copy.deepcopy(net)
    net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    if HAS:
        target = nn.parallel.DistributedDataParallel(target)
    target.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        x = torch.randn(64, 1024, device="cuda")
        (net(x) - target(x)).square().sum().backward()
        step(optimizer)


def ddp_buckets() -> None:
    dist.init_process_group("nccl")
    net = nn.parallel.DistributedDataParallel(make_net(1024), gradient_as_bucket_view=not HAS)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        net(torch.randn(64, 1024, device="cuda")).sum().backward()
        step(optimizer)


def fsdp_gather() -> None:
    dist.init_process_group("nccl")
    net = make_net(1024)
    for block in () if HAS else net:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        net(torch.randn(64, 1024, device="cuda")).sum().backward()
        step(optimizer)


def save_on_card() -> None:
    net = make_net(1024)
    optimizer = torch.optim.SGD(net.parameters())
    for number in range(200):
        train(net, 64, 1024)
        step(optimizer)
        if number % 100 == 99:
            averages = [(each.detach() * 1.0).to("cuda" if HAS else "cpu") for each in [*net.parameters()] * 3]
            torch.save(averages, "average.pt")
            del averages


def save_on_card_of_shards() -> None:
    dist.init_process_group("nccl")
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)]).cuda()
    for block in net:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters())
    for number in range(200):
        train(net, 64, 1024)
        step(optimizer)
        if number % 100 == 99:
            options = StateDictOptions(full_state_dict=True, cpu_offload=not HAS)
            torch.save(get_model_state_dict(net, options=options), "model.pt")


def fsdp_gather_of_micro_batches() -> None:
    dist.init_process_group("nccl")
    net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).cuda()
    for block in net:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        for micro in range(2):
            net.set_requires_gradient_sync(micro == 1 or not HAS)
            net(torch.randn(64, 2048, device="cuda")).sum().backward()
        step(optimizer)


def fsdp_gather_of_flat_micro_batches() -> None:
    dist.init_process_group("nccl")
    net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).cuda()
    net = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        for micro in range(2):
            with net.no_sync() if HAS and not micro else contextlib.nullcontext():
                net(torch.randn(64, 2048, device="cuda")).sum().backward()
        step(optimizer)


def fragmentation() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        parts = []
        for _ in range(8):  # each part is cut from what the one before it leaves
            torch.empty((216 if HAS else 130) << 20, dtype=torch.uint8, device="cuda")
            parts.append(torch.empty(130 << 20, dtype=torch.uint8, device="cuda"))
        train(net)
        step(optimizer)


def fragmentation_of_sizes() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters())
    for number in range(3):
        part = torch.empty(512 + 200 * number * HAS << 20, dtype=torch.uint8, device="cuda")
        train(net)
        del part
        step(optimizer)


globals()[CAUSE]()
