"""`convert` swaps the linear layers of a model for ours: the swapped classes, the rules, the report."""
