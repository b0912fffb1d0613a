"""Private names of dynamo and inductor."""
