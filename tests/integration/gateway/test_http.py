"""OpenAI's HTTP API with OpenAI's own client: answers, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from gateway.http.exchange import AT_ONCE
from octavo.v1.inference_pb2 import LENGTH, STOP, TokenLogprob, TokenLogprobs
from tests.integration.gateway.harness import running_gateway
from tests.integration.gateway.http_client import HttpClient
from tests.integration.gateway.scripted import ScriptedWorker, chunk, tiny_card, train_tokenizer

if TYPE_CHECKING:
    from kvstore.client import Broker

HI: Any = [{"role": "user", "content": "hi"}]


def spawn(work: Any) -> asyncio.Task[Any]:
    async def run() -> Any:
        return await work

    return asyncio.create_task(run())


async def test_a_completion(worker: ScriptedWorker, http: HttpClient) -> None:
    asked = spawn(http.openai.completions.create(model="tiny", prompt="a book", seed=7, temperature=0.5))
    (claim,) = await worker.claim()
    assert list(claim.job.prompt_token_ids) == train_tokenizer().encode("a book").ids
    assert (claim.job.sampling.seed, claim.job.sampling.temperature, claim.job.stopping.max_tokens) == (7, 0.5, 16)
    await worker.commit(chunk(claim, 0, [10, 11]), chunk(claim, 2, [12], finish=LENGTH))
    answer = await asked
    assert [(each.text, each.finish_reason, each.logprobs) for each in answer.choices] == [
        ("<10><11><12>", "length", None)
    ]
    prompt = len(claim.job.prompt_token_ids)
    assert (answer.object, answer.model, answer.id) == ("text_completion", "tiny", f"cmpl-{claim.job.request_id}")
    assert answer.system_fingerprint == "fp_" + "f" * 16
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (prompt, 3, prompt + 3)
    assert used.prompt_tokens_details.cached_tokens == 1


async def test_a_chat_is_streamed_as_it_is_made(worker: ScriptedWorker, http: HttpClient) -> None:
    asked = spawn(http.openai.chat.completions.create(model="tiny", messages=HI, stream=True, max_tokens=5))
    (claim,) = await worker.claim()
    rendered = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert list(claim.job.prompt_token_ids) == train_tokenizer().encode(rendered).ids
    assert claim.job.stopping.max_tokens == 5
    await worker.commit(chunk(claim, 0, [10], text="Hé"))
    stream = await asked
    first = await anext(stream)
    assert (first.object, first.choices[0].delta.role, first.choices[0].delta.content) == (
        "chat.completion.chunk",
        "assistant",
        "Hé",
    )
    await worker.commit(chunk(claim, 1, [11], text="llo"), chunk(claim, 2, [0], text="", finish=STOP))
    rest = [each async for each in stream]
    assert [each.choices[0].delta.content for each in rest] == ["llo", None]
    assert [each.choices[0].finish_reason for each in rest] == [None, "stop"]
    assert {each.id for each in (first, *rest)} == {f"chatcmpl-{claim.job.request_id}"}
    assert {each.system_fingerprint for each in (first, *rest)} == {"fp_" + "f" * 16}
    assert stream.response.headers["x-request-id"] == claim.job.request_id


async def test_the_usage_comes_last_where_a_stream_is_asked_for_it(worker: ScriptedWorker, http: HttpClient) -> None:
    worker.serve()
    options: Any = {"include_usage": True}
    stream = await http.openai.completions.create(model="tiny", prompt=[5, 6], stream=True, stream_options=options)
    events = [each async for each in stream]
    assert [each.usage for each in events[:-1]] == [None] * (len(events) - 1)
    assert (events[-1].choices, events[-1].usage.total_tokens) == ([], 5)
    assert "".join(each.choices[0].text for each in events[:-1]) == "<2><3><4>"


async def test_choices_and_log_probabilities(worker: ScriptedWorker, http: HttpClient) -> None:
    asked = spawn(http.openai.chat.completions.create(model="tiny", messages=HI, n=2, logprobs=True, top_logprobs=1))
    (claim,) = await worker.claim()
    assert (claim.job.n, claim.job.logprobs) == (2, 1)
    token = train_tokenizer().encode("é").ids[0]  # half of it
    for choice in (1, 0):
        delivery = chunk(claim, 0, [token], text=f"{choice}", choice=choice, finish=STOP, used=1 + (1 - choice))
        top = [TokenLogprob(token_id=0, logprob=-0.25)]
        delivery.chunk.logprobs.append(TokenLogprobs(token_id=token, logprob=-0.5, top=top))
        await worker.commit(delivery)
    answer = await asked
    assert [(each.index, each.message.content) for each in answer.choices] == [(0, "0"), (1, "1")]
    for choice in answer.choices:
        (told,) = choice.logprobs.content
        assert (told.token, bytes(told.bytes), told.logprob) == ("\ufffd", b"\xc3", -0.5)
        assert [(each.token, each.logprob) for each in told.top_logprobs] == [("<|end|>", -0.25)]
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_several_jobs(worker: ScriptedWorker, http: HttpClient, stream: bool) -> None:
    """More than are asked for at once."""
    worker.serve(tokens=1)
    prompts = [f"prompt {number}" for number in range(40)]
    asked = http.openai.completions.create(model="tiny", prompt=prompts, stream=stream, stop=["x"])
    async with asyncio.timeout(10):
        if not stream:
            answer = await asked
            assert [each.index for each in answer.choices] == list(range(40))
            return
        texts = [""] * 40
        async for event in await asked:
            texts[event.choices[0].index] += event.choices[0].text
    assert texts == ["<2>"] * 40


async def test_many_prompts_of_one_request_do_not_fill_the_queues(worker: ScriptedWorker, broker: Broker) -> None:
    worker.serve(tokens=1)
    running = running_gateway(broker, http_port=0, max_queue=AT_ONCE)
    async with running as (gateway, ready, _), HttpClient(gateway, ready) as http:
        answer = await http.openai.completions.create(model="tiny", prompt=["a"] * 3 * AT_ONCE)
    assert [each.text for each in answer.choices] == ["<2>"] * 3 * AT_ONCE


async def test_what_many_tokens_are_worth_is_told_by_a_thread(
    worker: ScriptedWorker, http: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.gateway._http is not None
    bodies = http.gateway._http._bodies
    run, large = bodies.run, []

    async def seen(work: Any, **how: bool) -> Any:
        large.append(how["large"])
        return await run(work, **how)

    monkeypatch.setattr(bodies, "run", seen)
    asked = spawn(http.openai.completions.create(model="tiny", prompt=[5] * 3000, echo=True, logprobs=2))
    (claim,) = await worker.claim()
    delivery = chunk(claim, 0, [10])
    top = [TokenLogprob(token_id=5, logprob=-1), TokenLogprob(token_id=6, logprob=-2)]
    delivery.chunk.prompt_logprobs.extend(TokenLogprobs(token_id=5, logprob=-1, top=top) for _ in range(2999))
    delivery.chunk.logprobs.append(TokenLogprobs(token_id=10, logprob=-1))
    end = chunk(claim, 1, [11], finish=STOP)
    end.chunk.logprobs.append(TokenLogprobs(token_id=11, logprob=-1))
    await worker.commit(delivery)
    await worker.commit(end)
    assert len((await asked).choices[0].logprobs.tokens) == 3002
    # The body; the prompt as text; the first response, with another one or not; the answer.
    assert large in ([False, False, True, False, True], [False, False, True, True])


async def test_an_echo_with_log_probabilities_is_of_the_prompts_own_tokens(
    worker: ScriptedWorker, http: HttpClient
) -> None:
    ids = train_tokenizer().encode("a book").ids
    asked = spawn(http.openai.completions.create(model="tiny", prompt="a book", echo=True, logprobs=0, max_tokens=0))
    (claim,) = await worker.claim()
    assert (list(claim.job.prompt_token_ids), claim.job.prompt_logprobs) == (ids, 0)
    delivery = chunk(claim, 0, [10], finish=LENGTH)
    delivery.chunk.logprobs.append(TokenLogprobs(token_id=10, logprob=-1))
    delivery.chunk.prompt_logprobs.extend(TokenLogprobs(token_id=token, logprob=-2) for token in ids[1:])
    await worker.commit(delivery)
    (choice,) = (await asked).choices
    assert choice.text == "".join(choice.logprobs.tokens) == "a book"
    assert choice.logprobs.token_logprobs == [None, *[-2] * (len(ids) - 1)]


async def test_token_ids_are_echoed_as_text(worker: ScriptedWorker, http: HttpClient) -> None:
    worker.serve()
    ids = train_tokenizer().encode("a book<|end|>").ids
    answer = await http.openai.completions.create(model="tiny", prompt=ids, echo=True)
    assert answer.choices[0].text == "a book<|end|><2><3><4>"


async def test_the_synchronous_client_is_served_too(worker: ScriptedWorker, http: HttpClient) -> None:
    worker.serve()

    def ask() -> tuple[str, list[str]]:
        with openai.OpenAI(
            base_url=http.base_url,
            api_key="secret",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False, timeout=20),
        ) as client:
            whole = client.completions.create(model="tiny", prompt="a")
            pieces = client.chat.completions.create(model="tiny", messages=HI, stream=True)
            return whole.choices[0].text, [event.choices[0].delta.content or "" for event in pieces]

    whole, pieces = await asyncio.to_thread(ask)
    assert whole == "".join(pieces) == "<2><3><4>"


TOOLED = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_called(broker: Broker, stream: bool) -> None:
    worker = ScriptedWorker(broker, card=tiny_card(template=TOOLED))
    await worker.start()
    async with running_gateway(broker, http_port=0) as (gateway, ready, _), HttpClient(gateway, ready) as http:
        asked = spawn(http.openai.chat.completions.create(messages=HI, tools=TOOLS, model="tiny", stream=stream))
        (claim,) = await worker.claim()
        text = train_tokenizer().decode(list(claim.job.prompt_token_ids))
        assert text == '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}userhi'
        await worker.commit(chunk(claim, 0, [10], text='<tool_call>{"name": "weather", "argum'))
        await worker.commit(chunk(claim, 1, [11], text='ents": {"city": "P"}}</tool_call>', finish=STOP))
        answer = await asked
        if stream:
            (event,) = [each async for each in answer]
            (call,), reason = event.choices[0].delta.tool_calls, event.choices[0].finish_reason
        else:
            (call,), reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        assert (call.function.name, call.function.arguments, reason) == ("weather", '{"city": "P"}', "tool_calls")
        # What the model has called goes back to it.
        said: Any = [*HI, {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]}]
        again = spawn(http.openai.chat.completions.create(messages=said, tools=TOOLS, model="tiny"))
        (claim,) = await worker.claim()
        text = train_tokenizer().decode(list(claim.job.prompt_token_ids))
        assert text.endswith('userhiassistant<tool_call>{"name": "weather", "arguments": {"city": "P"}}</tool_call>')
        await worker.answer(claim)
        assert (await again).choices[0].message.tool_calls is None
    await worker.stop()


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, "tools is set: the model's chat template takes none; leave them out"),
        *(
            (theirs, "tools is set: the model's template takes tools, but writes calls in a way that is not read here")
            for theirs in (TOOLED + "{# <function= #}", TOOLED.replace("tool_call>", "call>"))
        ),
    ],
)
async def test_tools_that_a_model_could_not_call_are_refused(broker: Broker, template: str | None, told: str) -> None:
    worker = ScriptedWorker(broker, card=tiny_card(template=template) if template else None)
    await worker.start()
    async with running_gateway(broker, http_port=0) as (gateway, ready, _), HttpClient(gateway, ready) as http:
        with pytest.raises(openai.BadRequestError) as caught:
            await http.openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
        assert caught.value.body["message"].startswith(told)  # type: ignore[index]
        assert caught.value.param == "tools"
    await worker.stop()


async def test_the_name_of_the_only_model_need_not_be_said(worker: ScriptedWorker, http: HttpClient) -> None:
    worker.serve()
    response = await http.plain.post("/v1/completions", json={"prompt": "a"})
    assert response.json()["model"] == "tiny"


async def test_what_a_client_is_goes_the_way_of_grpcs_metadata(
    worker: ScriptedWorker, http: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    generate = http.gateway._inference.generate

    async def spy(request: Any, context: Any, caller: Any) -> None:
        seen.append(dict(context.invocation_metadata()))
        await generate(request, context, caller)

    monkeypatch.setattr(http.gateway._inference, "generate", spy)
    worker.serve()
    await http.openai.completions.create(model="tiny", prompt="a", extra_headers={"TraceParent": "00-1"})
    assert (seen[0]["authorization"], seen[0]["traceparent"]) == ("Bearer secret", "00-1")
