"""What watches the step: operators, autograd, saved tensors, the graph, source lines."""
