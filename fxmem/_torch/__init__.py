"""Every private name of torch that fxmem uses, with why and since which version."""
