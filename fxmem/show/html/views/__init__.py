"""What notebooks show of a record, one module for each."""
