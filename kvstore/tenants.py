"""Tenants: whose a job is, and how much one may ask for.

A job's name in the fleet says whose it is: ``<tenant>/<request id>``, or the request id alone where no keys are in use.
No request id has a slash, so two tenants' requests never meet under one name: what is another tenant's is as unknown as
what never was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvstore.limits import MAX_REQUEST_ID, MAX_TENANT

TENANT: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_TENANT}}}")
REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID}}}")
NOBODY: Final = ""
"""The tenant of all calls where no keys are in use."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may ask for; None: no limit, unless said otherwise.

    Per minute: a bucket of that size that runs out evenly in a minute, so who has been quiet may ask for all at once.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers. A request is charged its prompt and the longest answers that it asks for; what it has not
    used comes back when it ends."""
    concurrency: int | None = None
    """Requests that have not ended."""
    max_priority: int | None = None
    """The highest that its requests may have; None: 0, as a higher one goes before those of other tenants."""

    def __bool__(self) -> bool:
        return self != Quota()


NO_QUOTA: Final = Quota()


def job_name(tenant: str, request_id: str) -> str:
    """What the fleet calls a tenant's request."""
    return f"{tenant}/{request_id}" if tenant else request_id


def tenant_of(name: str) -> str:
    """Whose a job of that name is."""
    return name.rpartition("/")[0]


def request_id_of(name: str) -> str:
    """What its tenant calls it."""
    return name.rpartition("/")[2]


def is_job_name(name: str) -> bool:
    """Whether a job can have that name."""
    tenant, slash, request_id = name.rpartition("/")
    return bool(REQUEST_ID.fullmatch(request_id) and (TENANT.fullmatch(tenant) or not slash))
