"""Cards: the catalogue, rates, workspaces of libraries, and cuDNN asked in a process of its own. No torch."""
