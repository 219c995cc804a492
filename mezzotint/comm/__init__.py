"""Communication between ranks: process groups, functional collectives and random numbers per rank. Tensors build on
it."""
