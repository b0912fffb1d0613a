"""The model as it is analysed: what is accepted, its fake copy, functions rebound to it."""
