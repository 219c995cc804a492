"""The trainer behind the commands: this package has their model, data, training loop and checkpoints, and the planner
that counts memory and traffic."""
