"""Programs whose batches vary by more than one length, by chance, or in how many samples they have."""

PRELUDE = """
import random
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

random.seed(11)
torch.manual_seed(11)
drawn = random.Random(5)


def move(batch):
    if isinstance(batch, torch.Tensor):
        return batch.cuda()
    if isinstance(batch, dict):
        return {name: move(each) for name, each in batch.items()}
    return [move(each) for each in batch] if isinstance(batch, (list, tuple)) else batch


def train(net, loader):
    net = net.cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for epoch in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = net(*move(batch))
            loss.backward()
            optimizer.step()


class Listed(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Tower(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        )

    def forward(self, x):
        return self.layers(x)


def attend(x, y):
    return (x @ y.transpose(1, 2)).softmax(-1) @ y

"""

PICTURES = """
def pad(samples):
    height, width = (max(each.shape[side] for each in samples) for side in (1, 2))
    return torch.stack([F.pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in samples]),

pictures = [torch.zeros(3, drawn.randint(40, 250), drawn.randint(40, 250)) for _ in range(160)]
"""

KINDS = {
    # The sides of pictures are free, and each is padded to the largest of its batch.
    "pictures of two sides": PICTURES
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.tower(x).mean((2, 3))).logsumexp(-1).mean()

train(Net(), DataLoader(Listed(pictures), 4, shuffle=True, collate_fn=pad))
""",
    # Attention along the width alone: a wide picture needs more than a larger one.
    "wide pictures": PICTURES
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, 1, 1), nn.Linear(8, 90)

    def forward(self, x):
        columns = self.stem(x).mean(2).transpose(1, 2).repeat(16, 1, 1)
        return self.head(attend(columns, columns)).logsumexp(-1).mean()

train(Net(), DataLoader(Listed(pictures), 4, shuffle=True, collate_fn=pad))
""",
    # Messages are per edge, features per node: most elements are most nodes, the most memory most edges.
    "nodes and edges": """
class Layer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, x, edges):
        sent = F.relu(self.message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
        return self.update(torch.zeros_like(x).index_add(0, edges[1], sent))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(x, edges)
        return x.pow(2).mean()

def merge(graphs):
    first, edges = 0, []
    for x, each in graphs:
        edges.append(each + first)
        first += len(x)
    return torch.cat([x for x, _ in graphs]), torch.cat(edges, 1)

def graph():
    nodes, edges = drawn.randint(20, 400), drawn.randint(50, 3000)
    return torch.zeros(nodes, 64), torch.zeros(2, edges, dtype=torch.int64)

train(Net(), DataLoader(Listed([graph() for _ in range(240)]), 6, shuffle=True, collate_fn=merge))
""",
    # Long sources are many elements; long targets are many logits.
    "sources and targets": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.sources, self.targets = nn.Embedding(500, 32), nn.Embedding(500, 32)
        self.encoder, self.head = nn.Linear(32, 32), nn.Linear(32, 500)

    def forward(self, source, target):
        memory = self.encoder(self.sources(source))
        logits = self.head(attend(self.targets(target), memory))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

def pad(pairs):
    return [pad_sequence(each, batch_first=True) for each in zip(*pairs)]

pairs = [
    (torch.ones(drawn.randint(20, 700), dtype=torch.int64), torch.ones(drawn.randint(5, 180), dtype=torch.int64))
    for _ in range(400)
]
train(Net(), DataLoader(Listed(pairs), 8, shuffle=True, collate_fn=pad))
""",
    # Pictures of one side, and a table of anchors by boxes for each of them.
    "boxes of detection": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.head = Tower(8), nn.Conv2d(16, 4, 1)

    def forward(self, pictures, targets):
        made = self.head(self.tower(pictures)).flatten(2).transpose(1, 2)
        losses = []
        for anchors, target in zip(made, targets):
            near = torch.maximum(anchors[:, None, :2], target[None, :, :2])
            far = torch.minimum(anchors[:, None, 2:], target[None, :, 2:])
            losses.append((far - near).clamp(min=0).prod(-1).amax(-1).mean())
        return torch.stack(losses).sum()

def split(samples):
    return torch.stack([picture for picture, _ in samples]), [boxes for _, boxes in samples]

counts = [drawn.choice([1, 2, 3, 5, 8, 60]) + drawn.randint(0, 9) for _ in range(240)]
samples = [(torch.zeros(3, 96, 96), torch.rand(count, 4)) for count in counts]
train(Net(), DataLoader(Listed(samples), 4, shuffle=True, collate_fn=split))
""",
    # As torchvision's detectors take them: a list of pictures of their own sizes, padded within the model.
    "listed pictures": PICTURES
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.head = Tower(8), nn.Conv2d(16, 4, 1)

    def forward(self, pictures):
        height, width = (max(each.shape[side] for each in pictures) for side in (1, 2))
        padded = pictures[0].new_zeros(len(pictures), 3, height, width)
        for number, each in enumerate(pictures):
            padded[number, :, : each.shape[1], : each.shape[2]].copy_(each)
        return self.head(self.tower(padded)).pow(2).mean()

train(Net(), DataLoader(Listed(pictures), 2, shuffle=True, collate_fn=lambda samples: (samples,)))
""",
    # As many tokens in each batch: few long samples or many short ones.
    "batches of so many tokens": """
class Tokens(Sampler):
    def __init__(self, lengths, most):
        by_length, self.batches, batch = sorted(range(len(lengths)), key=lengths.__getitem__), [], []
        for index in by_length:
            if batch and (len(batch) + 1) * lengths[index] > most:
                self.batches.append(batch)
                batch = []
            batch.append(index)
        self.batches.append(batch)
        drawn.shuffle(self.batches)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)

    def forward(self, ids):
        x = self.embed(ids)
        return F.cross_entropy(self.head(attend(x, x)).flatten(0, 1), ids.flatten())

texts = [torch.ones(drawn.randint(10, 600), dtype=torch.int64) for _ in range(500)]
loader = DataLoader(
    Listed(texts),
    batch_sampler=Tokens([*map(len, texts)], 2000),
    collate_fn=lambda samples: (pad_sequence(samples, batch_first=True),),
)
train(Net(), loader)
""",
    # Packed: one row of many texts, whose lengths come beside it.
    "packed texts": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.pool = nn.Embedding(300, 32), nn.Linear(32, 300), nn.Linear(32, 2000)

    def forward(self, ids, ends):
        x = self.embed(ids)
        pooled = self.pool(x[ends.long()])
        return F.cross_entropy(self.head(x), ids) + pooled.logsumexp(-1).mean()

def pack(texts):
    return torch.cat(texts), torch.tensor([*map(len, texts)]).cumsum(0) - 1

class Packs(Sampler):
    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        batch, total = [], 0
        for index in torch.randperm(len(self.lengths)).tolist():
            if total + self.lengths[index] > 1500:
                yield batch
                batch, total = [], 0
            batch.append(index)
            total += self.lengths[index]
        if batch:
            yield batch

texts = [torch.ones(drawn.choice([10, 20, 900, 1400]) + drawn.randint(0, 40), dtype=torch.int64) for _ in range(200)]
train(Net(), DataLoader(Listed(texts), batch_sampler=Packs([*map(len, texts)]), collate_fn=pack))
""",
    # Text, and so many patches of a picture as it is large.
    "text and patches": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.see, self.head = nn.Embedding(400, 32), nn.Linear(48, 32), nn.Linear(32, 400)

    def forward(self, ids, patches):
        x = torch.cat([self.see(patches), self.embed(ids)], 1)
        return F.cross_entropy(self.head(attend(x, x)[:, patches.shape[1] :]).flatten(0, 1), ids.flatten())

def pad(pairs):
    return [pad_sequence(each, batch_first=True) for each in zip(*pairs)]

pairs = [
    (torch.ones(drawn.randint(20, 300), dtype=torch.int64), torch.zeros(drawn.randint(0, 20) ** 2 + 1, 48))
    for _ in range(200)
]
train(Net(), DataLoader(Listed(pairs), 4, shuffle=True, collate_fn=pad))
""",
    # Frames and sides of videos.
    "videos": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.head = Tower(8), nn.Linear(16, 8)

    def forward(self, video):
        frames = self.tower(video.flatten(0, 1)).mean((2, 3)).unflatten(0, video.shape[:2])
        return self.head(frames).pow(2).mean()

def video():
    side = drawn.choice([32, 48, 64, 96])
    return torch.zeros(drawn.randint(4, 40), 3, side, side)

videos = Listed([video() for _ in range(100)])
train(Net(), DataLoader(videos, 1, shuffle=True, collate_fn=lambda each: (each[0][None],)))
""",
    # Each point is compared with each.
    "points of clouds": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(3, 32), nn.Linear(32, 8)

    def forward(self, points, colours):
        nearest = (points[:, None] - points[None]).pow(2).sum(-1).topk(8, largest=False).indices
        return self.head(self.up(points)[nearest].amax(1)).pow(2).mean() + colours.mean()

def cloud():
    return torch.zeros(drawn.randint(50, 900), 3), torch.zeros(drawn.randint(10, 9000))

train(Net(), DataLoader(Listed([cloud() for _ in range(80)]), 1, shuffle=True, collate_fn=lambda each: each[0]))
""",
    # A document's words, pairs of words and marks.
    "a dictionary of three lengths": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.score, self.tags = nn.Embedding(90, 32), nn.Bilinear(32, 32, 4), nn.Linear(32, 700)

    def forward(self, words, pairs, marks):
        x = self.embed(words)
        scores = self.score(x[pairs[:, 0]], x[pairs[:, 1]])
        return scores.mean() + F.cross_entropy(self.tags(x[marks]), marks % 7)

class Document(Net):
    def forward(self, batch):
        return super().forward(**batch)

def document():
    return {
        "words": torch.zeros(drawn.randint(10, 2000), dtype=torch.int64),
        "pairs": torch.zeros(drawn.randint(1, 700), 2, dtype=torch.int64),
        "marks": torch.zeros(drawn.randint(1, 500), dtype=torch.int64),
    }

documents = Listed([document() for _ in range(60)])
train(Document(), DataLoader(documents, 1, shuffle=True, collate_fn=lambda each: each))
""",
    # A picture has as many tiles as it needs: their number is free, and so is how many samples a batch has.
    "tiles and texts by tokens": """
class Budget(Sampler):
    def __init__(self, costs, most):
        self.costs, self.most = costs, most

    def __iter__(self):
        batch = []
        for index in torch.randperm(len(self.costs)).tolist():
            if batch and (len(batch) + 1) * max(self.costs[each] for each in [*batch, index]) > self.most:
                yield batch
                batch = []
            batch.append(index)
        yield batch

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.embed, self.head = Tower(8), nn.Embedding(300, 16), nn.Linear(16, 300)

    def forward(self, tiles, ids):
        seen = self.tower(tiles).mean((2, 3)).mean(0)
        return F.cross_entropy(self.head(self.embed(ids) + seen).flatten(0, 1), ids.flatten())

def merge(samples):
    return torch.cat([tiles for tiles, _ in samples]), pad_sequence([ids for _, ids in samples], batch_first=True)

samples = [
    (torch.zeros(drawn.choice([1, 1, 2, 4, 9]), 3, 32, 32), torch.ones(drawn.randint(10, 300), dtype=torch.int64))
    for _ in range(300)
]
loader = DataLoader(
    Listed(samples), batch_sampler=Budget([len(ids) for _, ids in samples], 1200), collate_fn=merge
)
train(Net(), loader)
""",
    # Lists that have more pictures, or fewer.
    "conversations with pictures": PICTURES
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.embed, self.head = Tower(8), nn.Embedding(300, 16), nn.Linear(16, 300)

    def forward(self, ids, pictures):
        seen = [self.tower(each[None]).mean((2, 3)) for each in pictures]
        return F.cross_entropy(self.head(self.embed(ids) + sum(seen, 0)), ids)

talks = [
    (torch.ones(drawn.randint(10, 900), dtype=torch.int64), drawn.sample(pictures, drawn.randint(0, 5)))
    for _ in range(60)
]
train(Net(), DataLoader(Listed(talks), 1, shuffle=True, collate_fn=lambda each: each[0]))
""",
    # Patches without their rest, and one token more.
    "patches of pictures": PICTURES
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 32, 16, 16), nn.Linear(32, 10)
        self.first = nn.Parameter(torch.zeros(1, 1, 32))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        return self.head(attend(x, x)[:, 0]).logsumexp(-1).mean()

train(Net(), DataLoader(Listed(pictures), 4, shuffle=True, collate_fn=pad))
""",
    # Micro-batches of sources and targets.
    "accumulated sources and targets": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.sources, self.targets, self.head = nn.Embedding(500, 32), nn.Embedding(500, 32), nn.Linear(32, 500)

    def forward(self, source, target):
        logits = self.head(attend(self.targets(target), self.sources(source)))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

def pad(pairs):
    return [pad_sequence(each, batch_first=True) for each in zip(*pairs)]

pairs = [
    (torch.ones(drawn.randint(20, 700), dtype=torch.int64), torch.ones(drawn.randint(5, 180), dtype=torch.int64))
    for _ in range(320)
]
net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for epoch in range(3):
    for number, batch in enumerate(DataLoader(Listed(pairs), 4, shuffle=True, collate_fn=pad)):
        net(*move(batch)).backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
""",
    # The share of a rank in each epoch, which the sampler draws from the epoch's number.
    "a rank's share": """
from torch.utils.data.distributed import DistributedSampler

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 32), nn.Linear(32, 500)

    def forward(self, ids):
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())

texts = [torch.ones(drawn.randint(20, 600), dtype=torch.int64) for _ in range(600)]
sampler = DistributedSampler(texts, num_replicas=4, rank=1)
loader = DataLoader(
    Listed(texts), 4, sampler=sampler, collate_fn=lambda samples: pad_sequence(samples, batch_first=True)
)
net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        net(batch.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
}
"""What decides in three epochs is in those that are read."""

RANDOM = {
    # Each time a sample is read it is cropped anew.
    "random crops": PICTURES
    + """
class Cropped(Listed):
    def __getitem__(self, index):
        height, width = random.randint(40, 200), random.randint(40, 200)
        return torch.zeros(3, height, width)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.tower(x).mean((2, 3))).logsumexp(-1).mean()

train(Net(), DataLoader(Cropped(pictures), 4, shuffle=True, collate_fn=pad))
""",
    # Sound is played faster or slower.
    "speeds": """
class Played(Listed):
    def __getitem__(self, index):
        return torch.zeros(int(len(self.items[index]) / random.uniform(0.5, 2)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 32, 9, 4, 4), nn.Linear(32, 40)

    def forward(self, sound):
        x = self.conv(sound[:, None]).transpose(1, 2)
        return self.head(F.gelu(x)).logsumexp(-1).mean()

sounds = [torch.zeros(drawn.randint(2000, 16000)) for _ in range(200)]
pad = lambda each: (pad_sequence(each, batch_first=True),)
train(Net(), DataLoader(Played(sounds), 4, shuffle=True, collate_fn=pad))
""",
    # All pictures of a batch get one of a few sizes.
    "sizes by batch": """
def resize(pictures):
    side = random.choice([64, 96, 128, 160])
    return F.interpolate(torch.stack(pictures), (side, side)),

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.tower(x).mean((2, 3))).logsumexp(-1).mean()

train(Net(), DataLoader(Listed([torch.zeros(3, 100, 100)] * 240), 4, shuffle=True, collate_fn=resize))
""",
    # What is drawn in a worker by torch.
    "dropped words": """
class Dropped(Listed):
    def __getitem__(self, index):
        text = self.items[index]
        return text[torch.rand(len(text)) > torch.rand(1)]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 32), nn.Linear(32, 500)

    def forward(self, ids):
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())

texts = [torch.ones(drawn.randint(20, 600), dtype=torch.int64) for _ in range(200)]
pad = lambda each: (pad_sequence(each, batch_first=True),)
train(Net(), DataLoader(Dropped(texts), 4, shuffle=True, collate_fn=pad))
""",
}
"""Another epoch may have longer ones."""
