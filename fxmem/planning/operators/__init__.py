"""Plans of single results of operators, by minimum cuts and local search."""
