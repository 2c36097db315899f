"""Requests that are being answered: each choice's text, how it ends, and what is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.matching import MatchError, without
from worker.params import AdmissionError, ReplayError, check_token_ids
from worker.sampling.draw import Draw
from worker.sampling.penalties import TokenCounts
from worker.scheduling.block import IntegrityError
from worker.sequence import Finish
from worker.step import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from collections.abc import Sequence as Many

    from worker.detokenize import TextStream
    from worker.params import StopParams
    from worker.sampling.draw import Drawn, TokenLogprobs
    from worker.sequence import Request, Sequence

NONE: frozenset[int] = frozenset()


class LiveRequest:
    """A request with the choices that are still open. They outlive preemptions.

    The prompt is computed once, as choice 0's. All choices draw their first tokens from its last row of logits; only
    then are there sequences for the others. A request that goes on has a sequence for each open choice from the start:
    they share what they can of the prompt through the pool.
    """

    __slots__ = ("_text_stream", "banned", "choices", "ends", "prompt_logprobs", "request", "unforked")

    def __init__(
        self, request: Request, eos_token_ids: frozenset[int], text_stream: Callable[[StopParams], TextStream]
    ) -> None:
        stopping = request.stopping
        self.request = request
        self.ends = frozenset(stopping.stop_token_ids) | (NONE if stopping.ignore_eos else eos_token_ids)
        """Tokens that end a choice, and can't be chosen before ``min_tokens``."""
        self.choices: dict[int, LiveChoice] = {}
        self.unforked = range(1, request.n)
        """Choices that have no sequence yet."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """As far as they are computed, and until they have been told."""
        self._text_stream = text_stream

    def open(self, sequence: Sequence) -> LiveChoice:
        """Begin the choice of a sequence, which has no token yet."""
        choice = LiveChoice(self, sequence, self._text_stream(self.request.stopping))
        self.choices[sequence.choice] = choice
        return choice

    def resume(
        self,
        said: Mapping[int, Many[int]],
        ended: Collection[int],
        sequence_of: Callable[[int], Sequence],
        *,
        vocab_size: int,
        context_length: int,
    ) -> None:
        """Open all choices but those that have ``ended``, each after what it has ``said``. Raises ReplayError."""
        numbers = range(self.request.n)
        self.unforked = range(0)
        still_open = [number for number in numbers if number not in ended]
        if not still_open or not {*said, *ended} <= {*numbers}:
            raise ReplayError(
                f"of {self.request.n} choices, {sorted({*said})} have said something, {sorted(ended)} ended"
            )
        for number in still_open:
            tokens = said.get(number, ())
            try:
                check_token_ids(f"the output of choice {number}", tokens, vocab_size)
            except AdmissionError as error:
                raise ReplayError(str(error)) from None
            prompt_told = 0 in ended or bool(said.get(0))
            self.open(sequence_of(number)).resume(tokens, prompt_told=prompt_told, context_length=context_length)

    def fail(self, error: str, *, refused: bool = False) -> list[Output]:
        """The last outputs, one for each choice that has not ended. ``refused``: see ``Output``."""
        parent = next(iter(self.choices.values())).sequence
        outputs = [choice.fail(error) for choice in self.choices.values()]
        outputs += [_last(parent, number, 0, "", "", error) for number in self.unforked]
        return [output._replace(refused=refused) for output in outputs]

    def check_integrity(self) -> None:
        """Between steps: raise IntegrityError unless the choices' accounts agree with their sequences."""
        if not self.choices or not {*self.choices}.isdisjoint(self.unforked):
            raise IntegrityError(f"{self.request.request_id!r} has choices {[*self.choices]}")
        for number, choice in self.choices.items():
            sequence = choice.sequence
            if sequence.request is not self.request or sequence.choice != number or choice.owner is not self:
                raise IntegrityError(f"{sequence} is not choice {number} of {self.request.request_id!r}")
            if self.unforked and sequence.num_output:
                raise IntegrityError(f"{sequence} goes on without the other choices")
            if not (number or sequence.num_output) and len(self.prompt_logprobs) != sequence.scored:
                raise IntegrityError(f"{sequence} has {len(self.prompt_logprobs)} log-probabilities of its prompt")
            if not choice.counts_agree():
                raise IntegrityError(f"{sequence} has said other tokens than are counted")


class LiveChoice:
    """One choice with the text made from its tokens."""

    __slots__ = ("counts", "matcher", "owner", "sequence", "text")

    def __init__(self, owner: LiveRequest, sequence: Sequence, text: TextStream) -> None:
        self.owner = owner
        self.sequence = sequence
        self.text = text
        request = owner.request
        self.counts = TokenCounts(request.prompt) if request.sampling.penalizes else None
        self.matcher = None if request.grammar is None else request.grammar.start()
        """Has seen all tokens but those that end the choice."""

    def resume(self, tokens: Many[int], *, prompt_told: bool, context_length: int) -> None:
        """Go on after these tokens. They, and the text that they made certain, were told before; ``prompt_told``: so
        were the log-probabilities of the prompt.

        Raises ReplayError when the choice would have ended by then, or can't have said that.
        """
        sequence, owner = self.sequence, self.owner
        sequence.tokens += tokens
        sequence.cached_tokens = 0  # was told by who began
        if sequence.choice or prompt_told:
            sequence.scored = sequence.num_prompt - 1
        if self.counts is not None:
            for token in tokens:
                self.counts.add(token)
        self.text.push(tokens)
        if not tokens:
            return
        ended = self.text.stop_match or not owner.ends.isdisjoint(tokens) or self._was_whole(tokens)
        full = sequence.num_output >= owner.request.stopping.max_tokens or sequence.num_tokens >= context_length
        if ended or full:
            raise ReplayError(
                f"choice {sequence.choice} can't go on after its {len(tokens)} tokens: "
                + ("they hold its end" if ended else "there is no room for more")
            )

    def draws(self, row: int) -> list[Draw]:
        """What is to be drawn from a row of logits: the next token, or everybody's first one."""
        request, position = self.owner.request, self.sequence.num_output
        banned = self.owner.ends if position < request.stopping.min_tokens else NONE
        allowed = None
        if self.matcher is not None:
            allowed, banned = without(self.matcher.mask(), banned), NONE
        numbers = (self.sequence.choice, *self.owner.unforked)
        shared = (position, self.counts, banned, request.logprobs, allowed)
        return [Draw(row, request.sampling, number, *shared) for number in numbers]

    def _is_whole(self, said: Many[int]) -> bool:
        """Whether these tokens bring the text to the end of its form."""
        return self.matcher is not None and self.matcher.accept(said)

    def _was_whole(self, said: Many[int]) -> bool:
        """The same of tokens that were told before. Raises ReplayError when the form has no such text."""
        if self._is_whole(said):
            return True
        try:
            if self.matcher is not None:
                self.matcher.mask()
        except MatchError as error:
            choice = self.sequence.choice
            raise ReplayError(f"choice {choice} can't have said its {len(said)} tokens: {error}") from error
        return False

    def append(self, drawn: Drawn, context_length: int) -> Output:
        """Take the next token, and tell what follows from it."""
        token = drawn.token_id
        assert token is not None
        sequence, owner, said = self.sequence, self.owner, (token,)
        sequence.tokens.append(token)
        num_output = sequence.num_output
        if self.counts is not None:
            self.counts.add(token)
        finish, stop_token = None, None
        if token in owner.ends:
            text = self.text.finish(token)
            finish, stop_token = Finish.STOP, token
        else:
            text = self.text.push(said)
            whole = self._is_whole(said)
            if self.text.stop_match:
                finish = Finish.STOP
            elif whole or num_output >= owner.request.stopping.max_tokens or sequence.num_tokens >= context_length:
                text += self.text.finish()
                # What was held back may turn out to complete a stop string at the very end.
                finish = Finish.STOP if whole or self.text.stop_match else Finish.LENGTH
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if owner.prompt_logprobs and sequence.choice == 0:
            prompt_logprobs = tuple(owner.prompt_logprobs)
            owner.prompt_logprobs.clear()
        return Output(
            request_id=owner.request.request_id,
            choice=sequence.choice,
            start=num_output - 1,
            token_ids=said,
            text=text,
            finish=finish,
            stop_match=self.text.stop_match,
            stop_token=stop_token,
            logprobs=() if drawn.logprobs is None else (drawn.logprobs,),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=sequence.cached_tokens or 0,
            prompt_tokens=sequence.num_prompt,
            completion_tokens=num_output,
        )

    def counts_agree(self) -> bool:
        """Whether what the penalties count is what was said."""
        if self.counts is None:
            return True
        expected = TokenCounts(self.owner.request.prompt, self.sequence.tokens[self.sequence.num_prompt :])
        return dict(zip(expected.ids, expected.counts, strict=True)) == dict(
            zip(self.counts.ids, self.counts.counts, strict=True)
        )

    def fail(self, error: str) -> Output:
        """Tell what was held back, and that there is no more."""
        text = self.text.finish()
        return _last(self.sequence, self.sequence.choice, self.sequence.num_output, text, self.text.stop_match, error)


def _last(sequence: Sequence, choice: int, num_output: int, text: str, stop_match: str, error: str) -> Output:
    return Output(
        request_id=sequence.request.request_id,
        choice=choice,
        start=num_output,
        text=text,
        finish=Finish.ERROR,
        stop_match=stop_match,
        error=error,
        cached_tokens=sequence.cached_tokens or 0,
        prompt_tokens=sequence.num_prompt,
        completion_tokens=num_output,
    )
