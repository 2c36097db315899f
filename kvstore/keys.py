"""Every Redis name, and the schema behind it.

``<request>`` is a job's name: its request id, and where keys are in use its tenant and a slash before it.

All names start with ``{octavo:<namespace>}:``; the braces keep one namespace in one cluster slot, so that a script may
touch several keys. ``<worker>`` is a worker's id, ``<incarnation>`` one life of a process.

==============================  ==================  ===================================================================
name                            type                what
==============================  ==================  ===================================================================
``job:<request>``               hash                payload (octavo.v1.Job, until it ended), digest (of the client's
                                                    request), caller (the client's call that asked for it last: who
                                                    has gone ends no other one's job), state (queued | running |
                                                    ended), worker,
                                                    worker_incarnation (submitted to, later: that claimed it), owner
                                                    (incarnation that claimed it), gateway (incarnation that wants the
                                                    answer), attempt, entry (id in the worker's stream), submitted_ms,
                                                    claimed_ms, deadline_ms (Redis clock, absent: none), choices,
                                                    began (tokens committed when its attempt began),
                                                    next:<choice> (next token index), end:<choice> (its finish, from
                                                    the worker), open (choices not ended: compared with
                                                    their ends), charge (tokens charged to
                                                    the load), prefill (prompt tokens charged as not cached, until the
                                                    first delivery), prompt_tokens, predicted (cached tokens, by who
                                                    sent it where it is), cached_tokens, fetched_tokens (of
                                                    those, from the page store), fingerprint and model
                                                    (of the worker), deaths (workers in a row that died of it),
                                                    fruitless (workers in a row that ran it and got no token),
                                                    able_ms (Redis clock: when there was last a worker for
                                                    it where it had to wait for its turn),
                                                    metered (tokens that its tenant was charged, until it ends),
                                                    detached ("1": nobody's leaving ends it), mover (call that
                                                    moved it to another worker last), route (its id in
                                                    ``routes``), stolen_from (worker), finish (of the choice that
                                                    ended last, or from outside), finisher. No TTL until it ended.
``jobs:<worker>``               stream              field ``request`` = id of a job that has not ended, in the order in
                                                    which they came. Its group ``workers`` has a consumer for each
                                                    incarnation: pending is what that one has read.
``log:<request>``               stream              token log: field ``d`` = octavo.v1.Deliveries with one delivery.
                                                    Expires with its job.
``worker:<worker>``             hash with TTL       lease: incarnation, model, fingerprint, block_size, context_length,
                                                    ... and what the last heartbeat measured.
``workers``                     sorted set          worker ids by last heartbeat (Redis clock, ms; 0: it left). Also
                                                    names the dead ones until their streams are empty.
``left:<worker>:<incarnation>`` string with TTL     that life drains, or left with jobs in its stream: "" said
                                                    goodbye and did not die of them, "broke" perhaps did.
``suspect:<worker>``            string with TTL     request id of the suspect that was moved there last: a job
                                                    that a worker may have died of. Believed as far as that job
                                                    is there still, and has few tokens since.
``orphaned:<worker>``           hash with TTL       by incarnation and what became of it: since when its jobs
                                                    have nobody to run them (Redis clock, ms). Gone where
                                                    nobody looks.
``ledger``                      hash                jobs ever accepted, and of those: finished, failed, cancelled,
                                                    expired, dead. With the entries of all streams they add up.
``dead:jobs``                   hash with TTL       octavo.v1.DeadJob by request id: jobs that too many workers died
                                                    of. Bounded by number and size.
``dead:times``                  sorted set, TTL     their ids by when they were given up (Redis clock, ms).
``live:<tenant>``               set                 request ids of a tenant's jobs that have not ended.
``quota:<tenant>``              hash with TTL       what a tenant has asked for, as buckets that run out evenly within
                                                    a minute: requests, tokens, and when that was so, at_ms (Redis
                                                    clock).
``keys``                        hash                API keys, where gateways have them from here: by SHA-256 of the key
                                                    in hex, a JSON object (tenant, name, ...); ``tenant:<tenant>``, its
                                                    limits; and ``version``, another one after every change.
``load:<worker>:<incarnation>`` hash                charged by routers, refunded when a job ends: jobs, sequences (their
                                                    choices), tokens; and at its first delivery: prefill (prompt tokens
                                                    not cached).
``held:<worker>:<incarnation>`` set with TTL        the first 16 bytes of each BlockHash that the worker's pool offers,
                                                    closed under prefix. Advice: the pool decides what is a hit.
``held:...:<replacement>``      set with TTL        what is to take that set's place, while it is written.
``routes``                      stream with TTL     field ``d`` = octavo.v1.RouteRecord: recent decisions, for explain
                                                    and replay. Bounded by number and size.
``gateway:<incarnation>``       string with TTL     lease of a gateway.
``channel:<incarnation>``       pub/sub             to a gateway: octavo.v1.Deliveries. To a worker: a request id that
                                                    was ended from outside, or moved to another worker. Only a
                                                    doorbell: the log and the job decide.
``help:<fingerprint>``          pub/sub             calls of workers that have jobs waiting which they can't read yet,
                                                    for others with the same pages (``kvstore.help``).
``model:<fingerprint>``         hash with TTL       what a gateway needs to serve a model without having it: the
                                                    tokenizer's files, context, vocabulary. Renewed by its workers.
``page:<fingerprint>:<hash>``   string with TTL     a page (``page.py``): a block's keys and values. Like the next two
                                                    it may be in a server of its own, and may vanish at any time.
``pages``                       sorted set, TTL     ``<fingerprint>:<hash>`` of pages by last use (Redis clock, ms).
``pages:sizes``                 hash with TTL       their sizes in bytes, and under ``total`` the sum.
``batch:<batch>``               hash                what is known of a batch (``batches.Batch``): its settings,
                                                    state and progress. Its requests and results are files. No TTL
                                                    until it ended.
``batches``                     sorted set          ids of batches by when they were accepted (Redis clock, ms).
``batches:open``                set                 ids of those that have not ended.
``batches:chore:<chore>``       string              that somebody has done it within its time; its TTL is that time.
``batches:turns``               sorted set, TTL     tenants by when a batch of theirs had its last turn (s).
``batches:queue``               no key              name of the queue of rq that has a job for each of these. rq's own
                                                    keys begin with ``rq:``, whatever the namespace: a queue's is
                                                    ``rq:queue:<its name>``.
==============================  ==================  ===================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUP = "workers"
"""Consumer group of every worker's stream. Consumers are named by incarnation."""

DEFAULT_NAMESPACE = "default"

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")

_TYPES = {
    **dict.fromkeys(("job", "worker", "orphaned", "ledger", "load", "model", "dead:jobs", "pages:sizes"), "hash"),
    **dict.fromkeys(("quota", "keys"), "hash"),
    **dict.fromkeys(("jobs", "log", "routes"), "stream"),
    **dict.fromkeys(("left", "suspect", "gateway", "page"), "string"),
    **dict.fromkeys(("workers", "dead:times", "pages"), "zset"),
    **dict.fromkeys(("held", "live"), "set"),
}
"""By name, or by the first part of it."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names within one namespace. ValueError unless that is 1 to 64 characters of [A-Za-z0-9._-]."""

    namespace: str = DEFAULT_NAMESPACE

    def __post_init__(self) -> None:
        # A brace would move keys to another slot, a colon could make two namespaces meet.
        if not _NAMESPACE.fullmatch(self.namespace):
            raise ValueError(f"namespace {self.namespace!r} is not 1 to 64 characters of [A-Za-z0-9._-]")

    @property
    def prefix(self) -> str:
        """What all names begin with, for scripts that must put names together."""
        return self._name("")

    def among(self, command: Sequence[object]) -> list[str]:
        """The names in a command."""
        return [part for part in command if isinstance(part, str) and part.startswith(self.prefix)]

    def type_of(self, name: str) -> str:
        """Of what type a key of that name is, as Redis calls it."""
        own = name.removeprefix(self.prefix)
        return _TYPES.get(own) or _TYPES[own.split(":")[0]]

    def _name(self, *parts: str) -> str:
        return ":".join((f"{{octavo:{self.namespace}}}", *parts))

    @property
    def workers(self) -> str:
        return self._name("workers")

    def job(self, request_id: str) -> str:
        return self._name("job", request_id)

    def jobs(self, worker: str) -> str:
        return self._name("jobs", worker)

    def log(self, request_id: str) -> str:
        return self._name("log", request_id)

    def worker(self, worker: str) -> str:
        return self._name("worker", worker)

    def left(self, worker: str, incarnation: str) -> str:
        return self._name("left", worker, incarnation)

    def suspect(self, worker: str) -> str:
        return self._name("suspect", worker)

    def orphaned(self, worker: str) -> str:
        return self._name("orphaned", worker)

    @property
    def ledger(self) -> str:
        return self._name("ledger")

    @property
    def dead(self) -> str:
        return self._name("dead", "jobs")

    @property
    def dead_times(self) -> str:
        return self._name("dead", "times")

    def live(self, tenant: str) -> str:
        return self._name("live", tenant)

    def quota(self, tenant: str) -> str:
        return self._name("quota", tenant)

    @property
    def api_keys(self) -> str:
        return self._name("keys")

    def load(self, worker: str, incarnation: str) -> str:
        return self._name("load", worker, incarnation)

    def held(self, worker: str, incarnation: str) -> str:
        return self._name("held", worker, incarnation)

    def held_replacement(self, worker: str, incarnation: str, replacement: str) -> str:
        return self._name("held", worker, incarnation, replacement)

    @property
    def routes(self) -> str:
        return self._name("routes")

    def gateway(self, incarnation: str) -> str:
        return self._name("gateway", incarnation)

    def channel(self, incarnation: str) -> str:
        return self._name("channel", incarnation)

    def help(self, fingerprint: str) -> str:
        return self._name("help", fingerprint)

    def model(self, fingerprint: str) -> str:
        return self._name("model", fingerprint)

    def page(self, fingerprint: str, hash_: str) -> str:
        return self._name("page", fingerprint, hash_)

    @property
    def pages(self) -> str:
        return self._name("pages")

    @property
    def page_sizes(self) -> str:
        return self._name("pages", "sizes")

    def batch(self, batch: str) -> str:
        return self._name("batch", batch)

    @property
    def batches(self) -> str:
        return self._name("batches")

    @property
    def open_batches(self) -> str:
        return self._name("batches", "open")

    def chore(self, name: str) -> str:
        return self._name("batches", "chore", name)

    @property
    def batch_turns(self) -> str:
        return self._name("batches", "turns")

    @property
    def batch_queue(self) -> str:
        return self._name("batches", "queue")
