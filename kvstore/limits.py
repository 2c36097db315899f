"""Bounds of a job that gateway and worker must agree on. Pure: the worker's core reads them too."""

from __future__ import annotations

MAX_CHOICES = 32
"""Answers to one prompt, at most. A job's hash has fields for each."""

MAX_PRIORITY = 100
"""Priorities lie between minus this and this."""
