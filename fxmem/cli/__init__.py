"""The command line: specs of models and inputs, verbs, their options and output."""
