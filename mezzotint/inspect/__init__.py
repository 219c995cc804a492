"""Inspection of what quantization does to the tensors of a model: this package gathers statistics in the graph, makes
figures of them and writes a page to look at.

`mezzotint.inspect(model, …)` is the region (`region.py`); `mezzotint.quantization_error(x, recipe)` looks at one
tensor.
"""
