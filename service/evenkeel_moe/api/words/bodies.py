"""The form of the texts that a response body contains."""

from pydantic import ConfigDict

AS_DOCUMENTED = ConfigDict(use_attribute_docstrings=True)
"""Of a pydantic dataclass: the docstrings are the descriptions in docs/openapi.json."""
