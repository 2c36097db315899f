"""Fields that others' servers take and that would change an answer: refused, where ignoring them would go unnoticed.

What is in neither this list nor ``gateway.http.fields`` changes no answer, and is ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gateway.errors import AdmissionError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

Row = tuple[tuple[Any, ...], str]


def _row(*harmless: Any, advice: str) -> Row:
    return (None, False, "", [], {}, *harmless), advice


_BOTH: Final[dict[str, Row]] = {
    "best_of": _row(1, advice="ask for n answers and choose"),
    "use_beam_search": _row(advice="leave it out"),
    "length_penalty": _row(1, advice="leave it out"),
    "truncate_prompt_tokens": _row(advice="shorten the prompt"),
    "prompt_embeds": _row(advice="send text or token ids"),
    "bad_words": _row(advice="use logit_bias"),
    "allowed_token_ids": _row(advice="use logit_bias or structured_outputs"),
    "logits_processors": _row(advice="leave it out"),
    "guided_choice": _row(advice="use structured_outputs.regex"),
    "guided_grammar": _row(advice="use structured_outputs.regex or response_format"),
    "grammar": _row(advice="use structured_outputs.regex or response_format"),
    "json_schema": _row(advice="use response_format"),
    "prompt_logprobs": _row(advice="use echo with logprobs, of completions"),
    "typical_p": _row(1, advice="use top_p or min_p"),
    "tfs_z": _row(1, advice="use top_p or min_p"),
    "top_a": _row(0, advice="use min_p"),
    "mirostat": _row(0, advice="leave it out"),
    "mirostat_mode": _row(0, advice="leave it out"),
    "dynatemp_range": _row(0, advice="leave it out"),
    "dry_multiplier": _row(0, advice="use repetition_penalty"),
    "xtc_probability": _row(0, advice="leave it out"),
    "repeat_penalty": _row(1, advice="use repetition_penalty"),
    "n_predict": _row(advice="use max_tokens"),
    "max_new_tokens": _row(advice="use max_tokens"),
    "skip_special_tokens": ((None, True), "control tokens are never part of the text"),
}
_OF_COMPLETIONS: Final[dict[str, Row]] = {
    "suffix": _row(advice="write it into the prompt, as the model was trained for it"),
    "max_completion_tokens": _row(advice="use max_tokens"),
    "response_format": _row({"type": "text"}, advice="use structured_outputs, or chat completions"),
}
_OF_CHATS: Final[dict[str, Row]] = {
    "functions": _row(advice="use tools"),
    "function_call": _row("none", "auto", advice="use tools and tool_choice"),
    "audio": _row(advice="answers are text"),
    "modalities": _row(["text"], advice="answers are text"),
    "web_search_options": _row(advice="nothing is looked up"),
    "reasoning_effort": _row("none", advice="say it in a message"),
    "verbosity": _row("medium", advice="say it in a message"),
    "chat_template": _row(advice="the model's own is used; completions take any text"),
    "chat_template_kwargs": _row(advice="the model's template is rendered without"),
    "documents": _row(advice="write them into a message"),
    "add_generation_prompt": ((None, True), "an answer is always begun; completions take any text"),
    "continue_final_message": _row(advice="completions take any text"),
    "echo": _row(advice="use completions"),
    "prompt": _row(advice="use messages, or completions"),
}
_TABLES: Final = {False: _BOTH | _OF_COMPLETIONS, True: _BOTH | _OF_CHATS}
"""By whether it is a chat: the values that change nothing, and what to do instead."""


def check(body: Mapping[str, Any], *, chat: bool) -> None:
    """Refuses, with AdmissionError, fields that would change the answer and can't be taken."""
    for name, (harmless, advice) in _TABLES[chat].items():
        value = body.get(name)
        if value not in harmless:
            told = shown(value) if isinstance(value, str | int | float) else "set"
            raise AdmissionError(name, told, f"is not taken here; {advice}")
