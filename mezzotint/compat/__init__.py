"""Transformer Engine's names that are only names here: code that imports them runs, and finds what took their place."""
