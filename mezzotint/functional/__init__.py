"""Pure cores: forward, setup, backward over argument objects. No modules, no recipes, no state."""
