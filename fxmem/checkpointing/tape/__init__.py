"""Single results of operators, brought back in backward by a record of the forward."""
