"""One rank of a step on many cards: a world that is not there, and what the rank sends into it."""
