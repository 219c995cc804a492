"""The command line is `mezzotint` or `python -m mezzotint`. What it needs beside torch
is the extra `mezzotint[cli]`."""
