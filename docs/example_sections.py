"""This extension lets mkdocstrings show the section `Example:` of a docstring as code.

The parser of Google's style knows `Examples:` as a section of doctests, and takes `Example:` for plain text, in which
`>>>` would be a quotation.
"""

import re
from typing import Any

import griffe

SECTION = re.compile(r"^Example:$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """This extension renames the section before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **given: Any) -> None:
        """Rename the section of one object."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub("Examples:", obj.docstring.value)
