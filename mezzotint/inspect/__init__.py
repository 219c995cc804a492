"""What quantization does to the tensors of a model: statistics in the graph, figures, a page to look at.

`mezzotint.inspect(model, …)` is the region (`region.py`); `mezzotint.quantization_error(x, recipe)` looks at one
tensor.
"""
