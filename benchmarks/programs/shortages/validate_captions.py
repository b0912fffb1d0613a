"""A captioner that validates without no_grad: the training batch of 128 fits, the validation of it does not."""

import torch
from torch import nn
from torchvision.models import resnet101


class Decoder(nn.Module):
    def __init__(self, words=9490, width=512, features=2048):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.encoder_att, self.decoder_att = nn.Linear(features, width), nn.Linear(width, width)
        self.full_att, self.f_beta, self.fc = nn.Linear(width, 1), nn.Linear(width, features), nn.Linear(width, words)
        self.init_h, self.init_c = nn.Linear(features, width), nn.Linear(features, width)
        self.cell = nn.LSTMCell(width + features, width)

    def forward(self, images, captions):
        images = images.flatten(1, 2)
        embeddings, encoded = self.embedding(captions), self.encoder_att(images)
        h, c = self.init_h(images.mean(1)), self.init_c(images.mean(1))
        predictions = torch.zeros(*captions.shape, 9490, device="cuda")
        for t in range(captions.shape[1]):
            scores = self.full_att((encoded + self.decoder_att(h).unsqueeze(1)).relu()).squeeze(2)
            seen = (images * scores.softmax(1).unsqueeze(2)).sum(1) * self.f_beta(h).sigmoid()
            h, c = self.cell(torch.cat([embeddings[:, t], seen], 1), (h, c))
            predictions[:, t] = self.fc(nn.functional.dropout(h, 0.5, self.training))
        return predictions


encoder = nn.Sequential(*list(resnet101().children())[:-2], nn.AdaptiveAvgPool2d(14)).cuda().requires_grad_(False)
decoder = Decoder().cuda()
optimizer = torch.optim.Adam(decoder.parameters(), 4e-4)
batch, length = 128, 51  # the longest that the tutorial keeps: 50 words and the end
for _ in range(2):
    captions = torch.randint(0, 9490, (batch, length), device="cuda")
    scores = decoder(encoder(torch.randn(batch, 3, 256, 256, device="cuda")).permute(0, 2, 3, 1), captions)
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), captions.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
encoder.eval(), decoder.eval()
for _ in range(3):
    captions = torch.randint(0, 9490, (batch, length), device="cuda")
    scores = decoder(encoder(torch.randn(batch, 3, 256, 256, device="cuda")).permute(0, 2, 3, 1), captions)
    scores_copy = scores.clone()
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), captions.flatten())
