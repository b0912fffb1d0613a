"""One step of a model: what was given, the model's copy, the step run, a generation."""
