"""Steps of random lengths, by the allocator's defaults."""

from benchmarks.programs.card_parts import train_on_lengths

train_on_lengths(200, 10)
