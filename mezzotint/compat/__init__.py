"""This package has names of Transformer Engine that are only names here: code that imports them runs, and
finds what took their place."""
