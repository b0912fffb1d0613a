"""A program whose compiled parts run as `torch.compile` would run them on the target."""
