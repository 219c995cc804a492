"""Communication between ranks: process groups, functional collectives, random numbers per rank. Tensors build on it."""
