"""Every name that torch keeps private, each with why it is needed and since when it exists."""
