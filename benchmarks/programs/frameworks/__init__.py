"""Programs of frameworks that the tests' environment has not, which run as ranks over gloo."""
