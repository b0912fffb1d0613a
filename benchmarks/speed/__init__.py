"""How long things take, how that grows, and what stays behind in memory."""
