"""The linear-like modules and the norms: they hold parameters and resolve arguments. The maths is in `functional`."""
