"""The causes that are known, a module each."""
