"""Which workers serve a name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from gateway import models
from gateway.errors import STARTING, AdmissionError, GatewayError, ModelNotFound, NoWorker
from gateway.models import STALE_S, Models, Served, choose
from gateway.tasks import Tasks
from kvstore.registry import Registry, WorkerInfo

if TYPE_CHECKING:
    from gateway.tokenize import ModelTokenizer, TokenizerPool


def worker(
    name: str, model: str = "m", fingerprint: str = "f", state: str = "ready", tokenizer: str = "t"
) -> WorkerInfo:
    return WorkerInfo(name, f"{name}-1", model, fingerprint, tokenizer, state)


def chosen(live: list[WorkerInfo], name: str = "", known: tuple[str, ...] = ()) -> list[str]:
    return [each.id for each in choose(live, name, dict.fromkeys(known))]


def test_the_only_model_needs_no_name() -> None:
    live = [worker("a"), worker("b"), worker("c", state="draining")]
    assert chosen(live) == ["a", "b"]
    assert chosen(live, "m") == ["a", "b"]


def test_several_models_need_one() -> None:
    live = [worker("a", "m"), worker("b", "n", "g")]
    assert chosen(live, "n") == ["b"]


def test_fingerprints_do_not_divide_a_fleet() -> None:
    """A CPU and a GPU that serve one model share its requests."""
    live = [worker("a", fingerprint="cpu"), worker("b", fingerprint="gpu"), worker("c", fingerprint="gpu")]
    assert chosen(live) == ["a", "b", "c"]


def test_one_tokenizer_per_request_the_one_that_most_workers_have() -> None:
    live = [worker("a", tokenizer="old"), worker("b", tokenizer="new"), worker("c", tokenizer="new")]
    assert chosen(live) == ["b", "c"]
    assert chosen(live[:2]) == ["b"]  # even: the smaller one, so that all gateways agree


@pytest.mark.parametrize(
    ("live", "name", "kind", "message"),
    [
        ([], "", NoWorker, f"no live worker; {STARTING}"),
        ([], "m", NoWorker, f"no live worker serves model 'm'; {STARTING}"),
        ([worker("a")], "gone", NoWorker, f"no live worker serves model 'gone'; {STARTING}"),
        ([worker("a")], "x", ModelNotFound, "model 'x' is not served; served: 'm'"),
        (
            [worker("a"), worker("b", "n")],
            "x" * 100,
            ModelNotFound,
            f"model '{'x' * 64}'... (100 characters) is not served; served: 'm', 'n'",
        ),
        ([worker("a"), worker("b", "n")], "", AdmissionError, "model is empty: must be one of 'm', 'n'"),
        ([worker("a", state="draining")], "m", NoWorker, f"all live workers of model 'm' are draining; {STARTING}"),
    ],
)
def test_refusals(live: list[WorkerInfo], name: str, kind: type[GatewayError], message: str) -> None:
    with pytest.raises(kind) as caught:
        chosen(live, name, known=("gone",))
    assert str(caught.value) == message


async def test_workers_are_counted_by_state_as_long_as_the_last_look_is_worth_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(models.time, "monotonic", lambda: clock[0])

    async def workers() -> list[WorkerInfo]:
        return [worker("a"), worker("b"), worker("c", state="draining")]

    registry = cast("Registry", SimpleNamespace(workers=workers))
    known = Models(registry, cast("TokenizerPool", None), Tasks())
    assert known.states == {}
    served = Served("m", cast("ModelTokenizer", None), (worker("a"),))
    assert [each.id for each in await known.workers(served)] == ["a", "b"]
    assert known.states == {"ready": 2, "draining": 1}
    clock[0] += STALE_S
    assert known.states == {"ready": 2, "draining": 1}
    clock[0] += 0.001
    assert known.states == {}
