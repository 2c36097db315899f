"""Whether a prefix is fetched as pages or computed: what takes less time, by what either took before.

Pure: times come from the caller.
"""

from __future__ import annotations

from typing import Final

MEMORY: Final = 0.2
"""How much the last fetch counts against all before it, if it was not a small one."""
QUICKER: Final = 0.5
"""The same, if it was quicker than these. While the store is taken for slow there are few fetches to learn from, and
nothing but speed makes one quick."""
MOST_SURPRISE: Final = 4.0
"""A fetch counts as no more than so many times slower than expected. What lasts is learnt all the same."""
PROBE_S: Final = 30.0
"""When fetching does not pay, one small fetch in so long finds out whether it does by now."""
ASK_S: Final = 5.0
"""When only the latency speaks against it, one question in so long finds out what it is by now."""
PROBE_TOKENS: Final = 256
"""No more than that are fetched to find out. A fetch of fewer tells less of the speed."""


class BreakEven:
    """A fetch of ``n`` tokens takes ``latency + n * seconds per token``; computing them ``n / prefill rate``."""

    def __init__(self) -> None:
        self.latency_s = 0.0
        """A round trip without pages."""
        self._token_s: float | None = None
        self._tokens = 0
        """Fetched so far."""
        self._probed = self._asked = float("-inf")

    @property
    def fetch_tok_s(self) -> float:
        """Tokens that a second of fetching brings; 0: nothing was fetched yet."""
        return 1 / self._token_s if self._token_s else 0.0

    def asked(self, seconds: float, now: float) -> None:
        """A question without pages took so long."""
        self._asked = now
        memory = QUICKER if seconds < self.latency_s else MEMORY
        self.latency_s = seconds if not self.latency_s else self.latency_s + memory * (seconds - self.latency_s)

    def late(self, seconds: float, now: float) -> None:
        """A question had no answer in so long. How much longer it takes is not known: it counts as a surprise."""
        self._probed = now
        self.asked(max(MOST_SURPRISE * seconds, self.latency_s), now)

    def fetched(self, tokens: int, seconds: float) -> None:
        """So many tokens were fetched in so long, and are ready to be taken in."""
        if tokens < 1 or seconds <= 0:
            return
        token_s, known = seconds / tokens, self._token_s
        if known is None:
            self._token_s, self._tokens = token_s, tokens
            return
        weight = (QUICKER if token_s < known else MEMORY) * min(tokens / PROBE_TOKENS, 1.0)
        if self._tokens < PROBE_TOKENS:  # what is known is little itself
            weight = max(weight, tokens / (self._tokens + tokens))
        self._tokens += tokens
        self._token_s = known + weight * (min(token_s, MOST_SURPRISE * known) - known)

    def worth_a_look(self, tokens: int, prefill_tok_s: float, now: float) -> bool:
        """Whether to ask what is there: ``most`` might be more than none, or the latency has to be found out."""
        if now - self._asked >= ASK_S and tokens * (self._token_s or 0.0) < tokens / prefill_tok_s:
            return True
        return self.pays(tokens, prefill_tok_s) or now - self._probed >= PROBE_S

    def most(self, tokens: int, prefill_tok_s: float, now: float) -> int:
        """How many of these tokens to fetch: all, none, or a few to find out whether it pays by now."""
        if self.pays(tokens, prefill_tok_s):
            return tokens
        if now - self._probed < PROBE_S:
            return 0
        self._probed = now
        return min(tokens, PROBE_TOKENS)

    def pays(self, tokens: int, prefill_tok_s: float) -> bool:
        """Whether so many tokens are sooner fetched than computed, as far as is known: what isn't, takes no time."""
        return self.latency_s + tokens * (self._token_s or 0.0) < tokens / prefill_tok_s

    def tokens(self, prefill_tok_s: float) -> float:
        """From how many tokens on fetching pays: infinity, if it never does."""
        gain = 1 / prefill_tok_s - (self._token_s or 0.0)
        return self.latency_s / gain if gain > 0 else float("inf")

    def described(self, prefill_tok_s: float) -> str:
        """One line for the log."""
        least = self.tokens(prefill_tok_s)
        verdict = "fetching never pays" if least == float("inf") else f"fetching pays from {least:.0f} tokens on"
        return (
            f"pages: {self.fetch_tok_s:.0f} tokens a second are fetched after {self.latency_s * 1000:.1f} ms, "
            f"{prefill_tok_s:.0f} computed: {verdict}"
        )
