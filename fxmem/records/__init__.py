"""Every type that crosses a border between rooms, and JSON in and out. No torch."""
