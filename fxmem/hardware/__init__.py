"""Cards and operators: the catalogue, rates, a row for each operator, and what libraries allocate. No torch."""
