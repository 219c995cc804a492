"""Modules: parameters and the resolution of arguments. The maths is in `functional`."""
