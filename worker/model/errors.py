"""What can go wrong before a model serves.

::

    ModelError                the worker can't start with this model
    ├── ModelNotFound         nothing is where the specification points
    ├── ModelDamaged          files that are cut short, altered, or lack (or have too many) tensors
    └── ModelUnsupported      a model, or a setting of one, that this worker can't run right
"""

from __future__ import annotations


class ModelError(Exception):
    """The worker can't start with this model. The message says which file or setting, and what to do."""


class ModelNotFound(ModelError):  # noqa: N818 - reads as a fact, like FileNotFound
    """Nothing is where the specification points."""


class ModelDamaged(ModelError):  # noqa: N818
    """Files that are cut short, altered, or whose tensors are not those that the configuration asks for."""


class ModelUnsupported(ModelError):  # noqa: N818
    """A model, or a setting of one, that this worker can't run right."""
