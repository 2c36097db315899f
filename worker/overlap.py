"""How much this worker holds of prompts that wait at others, so that one that takes a job knows what it will find.

::

    jobs that wait elsewhere --look--> tokens held of each --note--> known for KNOWN_S, or until one is taken

By the rule of the engine: whole blocks, from the prompt's beginning on, and nothing of a prompt whose own
log-probabilities are wanted. Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.block_hash import child, root
from kvstore.prefix_index import short
from kvstore.tenants import tenant_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from kvstore.block_hash import BlockHash
    from kvstore.stealing import Waiting

KNOWN_S: Final = 1.0
"""What was found of a job counts for so long. A free worker computes little, so what it holds hardly changes; but it
asks up to twenty times a second, and prompts are neither sent nor hashed anew each time."""
HASHED_AT_ONCE: Final = 4096
"""Tokens whose hashes take no longer than a millisecond or two; more are looked for in a thread."""


def held_tokens(prompt: Sequence[int], empty: BlockHash, block_size: int, offered: AbstractSet[bytes]) -> int:
    """How many of a prompt's first tokens are in the blocks that a pool offers. Hashed no further than to the first
    block that it does not offer.

    ``empty``: hash of the empty prefix. ``offered``: short hashes, closed under prefix.
    """
    parent, end = empty, 0
    while end + block_size <= len(prompt):
        parent = child(parent, prompt[end : end + block_size])
        if short(parent) not in offered:
            break
        end += block_size
    return end


class Overlaps:
    """What one worker holds of jobs that wait at others. Times are of the caller's monotonic clock."""

    def __init__(self, fingerprint: str, block_size: int, offered: AbstractSet[bytes]) -> None:
        """``offered``: what the worker's pool offers, as short hashes; it follows the pool."""
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._offered = offered
        # By victim and entry: tokens held, and when that was found.
        self._found: dict[tuple[str, str], tuple[int, float]] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to be found at all."""
        return bool(self._offered)

    def known(self, victim: str, now: float) -> dict[str, int]:
        """Of the victim's entries that need no new look: tokens held. What is old is forgotten."""
        self._found = {name: each for name, each in self._found.items() if now - each[1] <= KNOWN_S}
        return {entry: tokens for (worker, entry), (tokens, _) in self._found.items() if worker == victim}

    def look(self, waiting: Sequence[Waiting]) -> dict[str, int]:
        """By entry id, how many tokens are held of each. May run in another thread while the pool's offers change: it
        asks for one block at a time, and one that goes meanwhile might as well have gone a moment later."""
        found: dict[str, int] = {}
        for each in waiting:
            job = each.job
            tenant = tenant_of(job.request_id)
            empty = root(self._fingerprint, self._block_size, job.cache_salt, tenant=tenant)
            scored = job.HasField("prompt_logprobs")
            tokens = 0 if scored else held_tokens(job.prompt_token_ids, empty, self._block_size, self._offered)
            found[each.entry_id] = tokens
        return found

    def note(self, victim: str, found: dict[str, int], now: float) -> None:
        """What ``look`` has found."""
        self._found |= {(victim, entry): (tokens, now) for entry, tokens in found.items()}

    def forget(self) -> None:
        """A job was taken: what this worker holds is about to change."""
        self._found.clear()
