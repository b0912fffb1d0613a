"""What torch's own C++ allocates on a card, asked on a machine without one (`make releases`)."""
