"""What the commands run: model, data, training loop, checkpoints, and the planner that counts memory and traffic."""
