"""Which models there are, by HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.integration.gateway.harness import running_gateway
from tests.integration.gateway.http_client import HttpClient
from tests.integration.gateway.scripted import CONTEXT, ScriptedWorker, tiny_card

if TYPE_CHECKING:
    from kvstore.client import Broker


async def test_models(worker: ScriptedWorker, http: HttpClient) -> None:
    (model,) = [each async for each in http.openai.models.list()]
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "octavo", CONTEXT)  # type: ignore[attr-defined]
    assert (await http.openai.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await http.openai.models.retrieve("large")


async def test_each_of_several_models_is_found_by_its_name(broker: Broker) -> None:
    large = ScriptedWorker(broker, "w0", card=tiny_card("a" * 16), model="house/large", context_length=512)
    workers = (large, ScriptedWorker(broker, "w1"))
    for each in workers:
        await each.start()
    async with running_gateway(broker, http_port=0) as (gateway, ready, _), HttpClient(gateway, ready) as http:
        assert [each.id async for each in http.openai.models.list()] == ["house/large", "tiny"]
        for name, length in (("house/large", 512), ("tiny", CONTEXT)):
            model: Any = await http.openai.models.retrieve(name)
            assert (model.id, model.max_model_len) == (name, length)
        for name in ("house", "large", "house/large/"):
            assert (await http.plain.get(f"/v1/models/{name}")).status_code == 404
        # Which one answers has to be said then.
        with pytest.raises(openai.BadRequestError, match="model"):
            await http.openai.completions.create(model="", prompt="a")
        large.serve()
        answer = await http.openai.completions.create(model="house/large", prompt="a")
        assert (answer.model, answer.system_fingerprint) == ("house/large", "fp_" + "a" * 16)
    for each in workers:
        await each.stop()


async def test_a_model_that_has_just_gone_is_left_out(
    worker: ScriptedWorker, http: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def names() -> list[str]:
        return ["large", "tiny"]

    monkeypatch.setattr(http.gateway._models, "names", names)
    assert [each.id async for each in http.openai.models.list()] == ["tiny"]
