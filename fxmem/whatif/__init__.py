"""Questions answered by analysing the step again: plans, advice, the largest batch, cards."""
