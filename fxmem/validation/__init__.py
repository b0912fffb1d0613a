"""The real step on the CPU or a card, and the prediction's error."""
