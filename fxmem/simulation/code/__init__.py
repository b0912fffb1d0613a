"""The user's lines and frames: where a call comes from, whose a module is, what a round is."""
