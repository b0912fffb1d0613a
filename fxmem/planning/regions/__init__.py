"""Plans of regions: what a checkpointed region keeps and recomputes, and the searches over regions."""
