"""For mkdocstrings: the section `Example:` of a docstring is code with its output, as `Examples:` is."""

from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Renames the section before docstrings are parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section of one object."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
