"""Whose a job is."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from kvstore.block_hash import root
from kvstore.limits import MAX_CHOICES, MAX_JOB_NAME
from kvstore.tenants import Quota, is_job_name, job_name, request_id_of, tenant_of


@pytest.mark.parametrize("request_id", ["r1", "a:b.c-d_e", "x" * 128])
@pytest.mark.parametrize("tenant", ["", "acme", "a.b-c_d", "t" * 64])
def test_a_name_says_whose_it_is(tenant: str, request_id: str) -> None:
    name = job_name(tenant, request_id)
    assert (tenant_of(name), request_id_of(name)) == (tenant, request_id)
    assert is_job_name(name)
    assert len(name) <= MAX_JOB_NAME


@pytest.mark.parametrize("name", ["", "/r", "acme/", "a/b/c", "a b", "acme/r r", "a:b/r", "t" * 65 + "/r", "x" * 129])
def test_what_names_no_job(name: str) -> None:
    assert not is_job_name(name)


def test_a_quota_is_true_where_it_limits_something() -> None:
    assert not Quota()
    assert Quota(concurrency=1)


def test_tenants_have_roots_of_their_own() -> None:
    """Whatever salt, adapter or tenant's name somebody chooses."""
    roots = [
        root("f", 16, "a"),
        root("f", 16, "", "a"),
        root("f", 16, tenant="a"),
        root("f", 16, "a", tenant="a"),
        root("f", 16, tenant="b"),
        root("f", 16, "b", tenant="a"),
        root("f", 16),
    ]
    assert len({*roots}) == len(roots)
    assert root("f", 16, "s", tenant="") == root("f", 16, "s")


def test_scripts_know_how_many_choices_a_job_may_have() -> None:
    text = (resources.files("kvstore") / "lua" / "common.lua").read_text()
    assert re.findall(r"MOST_CHOICES = (\d+)", text) == [str(MAX_CHOICES)]
