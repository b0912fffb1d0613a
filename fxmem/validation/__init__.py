"""The real step, on the CPU or a card, and how far the prediction was from it."""
