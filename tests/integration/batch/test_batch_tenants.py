"""Files and batches where API keys are in use: each tenant has its own, and lines run as whose they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from gateway.batch import batches
from gateway.batch.batches import Place
from kvstore.api_keys import ApiKey, digest_of, entry_of, limits_of
from kvstore.batches import BatchState
from kvstore.key_file import KeyFile
from kvstore.tenants import Quota

if TYPE_CHECKING:
    from tests.integration.batch.conftest import World

NONE = {"file": "file-" + "0" * 24, "batch": "batch_" + "0" * 24}
"""Ids of what never was."""
URL = "/v1/completions"


class Tenant(httpx2.AsyncClient):
    """One with a key."""

    def __init__(self, world: World, name: str) -> None:
        headers = {"authorization": f"Bearer key of {name}"}
        super().__init__(base_url=f"http://{world.http}/v1", headers=headers, trust_env=False, timeout=20)

    async def upload(self, *lines: bytes) -> str:
        form: Any = {"file": ("a.jsonl", b"\n".join(lines))}
        response = await self.post("/files", data={"purpose": "batch"}, files=form)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    async def create(self, file_id: str) -> httpx2.Response:
        body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
        return await self.post("/batches", json=body)

    async def ids(self, path: str) -> list[str]:
        return [each["id"] for each in (await self.get(path)).json()["data"]]


def line(number: int, max_tokens: int = 3) -> bytes:
    body = {"prompt": f"Line {number}", "max_tokens": max_tokens, "ignore_eos": True}
    return json.dumps({"custom_id": f"l{number}", "method": "POST", "url": URL, "body": body}).encode()


async def keys_in(path: Path) -> str:
    """Of `acme`, which may ask for 1,000 tokens in a minute, of `other`, and of `boss`, an operator."""
    store = KeyFile(path)
    for name in ("acme", "other", "boss"):
        await store.put(entry_of(ApiKey(digest_of(f"key of {name}"), name, operator=name == "boss")))
    await store.put(limits_of("acme", Quota(tokens_per_minute=1000)))
    return str(path)


@pytest.mark.timeout(120)
async def test_lines_run_as_the_tenant_of_their_batch_and_as_nobody_else(world: World, tmp_path: Path) -> None:
    keys = await keys_in(tmp_path / "keys")
    async with (
        world.fleet(http_port=0, batches=str(world.place.folder), keys=keys),
        Tenant(world, "acme") as acme,
    ):
        file_id = await acme.upload(*(line(number) for number in range(4)), line(4, max_tokens=2000))
        batch_id = (await acme.create(file_id)).json()["id"]
        # A key that is no operator's can't ask for others: nothing runs, and nothing fails.
        async with world.batch_worker("b0", "--api-key", "key of other"):
            batch = await world.until(batch_id, lambda batch: bool(batch.progress.trouble))
            assert batch.progress.trouble.startswith("PERMISSION_DENIED: octavo-tenant is for operators")
            assert (batch.state, batch.progress.done, batch.progress.failed) == (BatchState.RUNNING, 0, 0)
        async with world.batch_worker("b1", "--api-key", "key of boss"):
            batch = await world.ended(batch_id)
        assert (batch.state, batch.progress.done, batch.progress.failed) == (BatchState.COMPLETED, 4, 1)
        told = (await acme.get(f"/batches/{batch_id}")).json()
        (failure,) = (await acme.get(f"/files/{told['error_file_id']}/content")).text.splitlines()
    error = json.loads(failure)["response"]
    # It will never fit into what the tenant may ask for, so it does not wait for that.
    assert (error["status_code"], error["body"]["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "1000 are allowed; ask for fewer" in error["body"]["error"]["message"]
    exist = [await world.broker.call("EXISTS", world.broker.keys.job(f"acme/{batch_id}.{each}")) for each in (1, 4, 5)]
    assert exist == [1, 1, 0]
    assert await world.broker.call("EXISTS", world.broker.keys.job(f"{batch_id}.1")) == 0


@pytest.mark.timeout(120)
async def test_a_batch_that_waits_holds_up_nobody_elses(world: World, tmp_path: Path) -> None:
    """One worker of batches, and the first batch is of a tenant that may send a request in ten seconds."""
    keys = await keys_in(tmp_path / "keys")
    await KeyFile(Path(keys)).put(limits_of("acme", Quota(requests_per_minute=6)))
    async with (
        world.fleet(http_port=0, batches=str(world.place.folder), keys=keys),
        Tenant(world, "acme") as acme,
        Tenant(world, "other") as other,
        world.batch_worker("b0", "--api-key", "key of boss"),
    ):
        slow = (await acme.create(await acme.upload(*(line(number) for number in range(8))))).json()["id"]
        later = (await acme.create(await acme.upload(line(9)))).json()["id"]
        await world.until(slow, lambda batch: bool(batch.progress.trouble))
        quick = (await other.create(await other.upload(*(line(number) for number in range(20))))).json()["id"]
        ended = await world.ended(quick)
        assert (ended.state, ended.progress.done) == (BatchState.COMPLETED, 20)
        waits = await world.status(slow)
        assert (waits.state, (await world.status(later)).state) == (BatchState.RUNNING, BatchState.QUEUED)
        assert waits.progress.done < 8
        await acme.post(f"/batches/{later}/cancel")
        assert (await world.ended(slow)).progress.done == 8
        assert sorted(json.loads(each)["custom_id"] for each in batches.results(world.place, slow)) == [
            f"l{number}" for number in range(8)
        ]
    assert (await world.ledger())["accepted"] == 8 + 20


async def test_what_is_another_tenants_is_as_unknown_as_what_never_was(world: World, tmp_path: Path) -> None:
    keys = await keys_in(tmp_path / "keys")
    async with (
        world.fleet(http_port=0, batches=str(world.place.folder), keys=keys),
        Tenant(world, "acme") as acme,
        Tenant(world, "other") as other,
        Tenant(world, "nobody") as nobody,
    ):
        file_id = await acme.upload(line(1))
        batch_id = (await acme.create(file_id)).json()["id"]
        ids = {"file": file_id, "batch": batch_id}
        for tenant, seen in ((acme, [[file_id], [batch_id]]), (other, [[], []])):
            assert [await tenant.ids("/files"), await tenant.ids("/batches")] == seen
        for method, path, kind in (
            ("GET", "/files/{}", "file"),
            ("GET", "/files/{}/content", "file"),
            ("DELETE", "/files/{}", "file"),
            ("GET", "/batches/{}", "batch"),
            ("POST", "/batches/{}/cancel", "batch"),
        ):
            found = [await other.request(method, path.format(each)) for each in (ids[kind], NONE[kind])]
            assert [each.status_code for each in found] == [404, 404], path
            assert found[0].text.replace(ids[kind], NONE[kind]) == found[1].text
            assert (await nobody.request(method, path.format(ids[kind]))).status_code == 401
        found = [await other.create(each) for each in (file_id, NONE["file"])]
        assert [each.status_code for each in found] == [404, 404]
        assert (await nobody.post("/files", content=b"x")).status_code == 401
        assert (await nobody.post("/batches", content=b"{")).status_code == 401
        assert (await acme.get(f"/files/{file_id}/content")).content == line(1)
        assert (await acme.post(f"/batches/{batch_id}/cancel")).json()["status"] == "cancelled"


async def test_batches_of_the_command_are_nobodys_by_http(world: World) -> None:
    async with world.fleet(http_port=0, batches=str(world.place.folder)), Tenant(world, "acme") as client:
        batch_id = await world.submit({"id": "a", "prompt": "x"})
        assert await client.ids("/batches") == []
        assert (await client.get(f"/batches/{batch_id}")).status_code == 404


def test_no_tenants_name_leads_out_of_its_folder(world: World, tmp_path: Path) -> None:
    place = Place(world.store, tmp_path)
    for tenant in ("", ".", "..", "acme"):
        new = place.files(tenant).new()
        told = new.keep("x", "batch", 5)
        assert place.files(tenant).all() == [told]
    assert len(place.all_files()) == 4
    assert {each.name for each in (tmp_path / "files").iterdir()} == {"of-", "of-.", "of-..", "of-acme"}
