"""`convert` swaps the linear layers of a model for ours: this package has the swapped
classes, the rules and the report."""
