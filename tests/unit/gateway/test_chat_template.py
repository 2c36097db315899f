"""Chat templates, rendered as transformers renders them, and no further than a template should get."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gateway.chat_template import ChatTemplate

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "be <brief> & 'exact'"},
    {"role": "user", "content": "  ü?\n"},
    {"role": "assistant", "content": "yes"},
]
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m.content | trim + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ pad_token is defined }}",
    "tools and documents": "{{ tools is none }}{{ documents is none }}{% if not tools %}x{% endif %}",
    "blocks are trimmed": "a\n    {% if true %}\n  b\n    {% endif %}\n  {{ 'c' }}\n  d\n\n",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% endfor %}"
    "{% for m in messages %}{% break %}{{ m.role }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ messages[1] | tojson(ensure_ascii=True) }}"
    "{{ {'b': 1, 'a': none} | tojson(separators=(',', ':'), sort_keys=true) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "names inside generation": "{% set ns = namespace(n=0) %}{% generation %}\n  {% set ns.n = 2 %}{% set x = 1 %}"
    "{% endgeneration %}\n{{ ns.n }}{{ x }}",
    "namespace": "{% set ns = namespace(found=false, self=3) %}{{ ns.self }}{{ namespace({'a': 5}).a }}"
    "{% for m in messages %}{% set ns.found = m.role %}{% endfor %}{{ ns.found }}",
    "dict": "{{ dict(a=1) }}{{ dict([('b', 2)], c=3).b }}{{ dict.fromkeys([1, 2], 3) }}",
    "methods": "{{ messages[0].content.split()[0].upper() }}{{ messages[1:] | map(attribute='role') | join(',') }}",
    "a format that would look in": "{{ '{0.__class__}'.format(messages) }}",
    "date": "{{ strftime_now('%Y') | length }}",
}


def reference(template: str | dict[str, str]) -> Any:
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **SPECIALS)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_it_renders_what_transformers_renders(template: str) -> None:
    expected = reference(template).apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(template, SPECIALS).render(MESSAGES) == expected


REFUSED = {
    "a class": "{{ ''.__class__.__mro__ }}",
    "a method's globals": "{{ messages.append.__globals__ }}",
    "the type of dict": "{{ dict.__class__.__init__.__globals__ }}",
    "a namespace's own": "{% set ns = namespace(__class__=1) %}",
    "a namespace's own, later": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "a change of messages": "{{ messages.append(1) }}",
    "a range without end": "{{ range(10000000) | list }}",
    "what it says itself": "{{ raise_exception('roles must alternate') }}",
}


@pytest.mark.parametrize("template", REFUSED.values(), ids=REFUSED)
def test_what_transformers_refuses_is_refused(template: str) -> None:
    with pytest.raises((TemplateError, OverflowError)) as theirs:
        reference(template).apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    with pytest.raises(type(theirs.value)) as ours:
        ChatTemplate(template, SPECIALS).render(MESSAGES)
    assert type(ours.value) is type(theirs.value)


def test_names_that_could_be_pythons_own_are_told() -> None:
    with pytest.raises(SecurityError, match=r"can't set '__class__'"):
        ChatTemplate("{{ namespace(__class__=1) }}", {}).render(MESSAGES)


def test_of_several_the_default_one_is_rendered() -> None:
    assert ChatTemplate({"tool_use": "x", "default": "y"}, {}).render(MESSAGES) == "y"
    with pytest.raises(ValueError, match=r"none is called 'default': \['rag', 'tool_use'\]"):
        ChatTemplate({"tool_use": "x", "rag": "z"}, {}).render(MESSAGES)


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"é": 1}}}}
]
CALLED = [
    {"role": "user", "content": "how is it?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
        ],
    },
    {"role": "tool", "content": "fine", "tool_call_id": "c", "name": "weather"},
]
WITH_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_call_id }}{{ m.name }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("template", [WITH_TOOLS, {"default": "y", "tool_use": WITH_TOOLS}, {"default": WITH_TOOLS}])
def test_tools_are_rendered_as_transformers_renders_them(template: str | dict[str, str]) -> None:
    expected = reference(template).apply_chat_template(CALLED, TOOLS, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(template, SPECIALS).render(CALLED, TOOLS) == expected
    assert '"name": "weather"' in expected


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        (WITH_TOOLS, True),
        (TEMPLATES["chatml"], False),
        ("{% set tools = [] %}{{ tools }}", False),
        ({"default": "x", "tool_use": WITH_TOOLS}, True),
        ({"default": WITH_TOOLS, "tool_use": "x"}, False),
    ],
)
def test_whether_a_template_does_anything_with_tools(template: str | dict[str, str], takes: bool) -> None:
    read = ChatTemplate(template, SPECIALS)
    assert read.takes_tools is takes
    assert read.says("<tool_call>") is takes


def test_a_chat_has_messages() -> None:
    with pytest.raises(ValueError, match="at least one message"):
        ChatTemplate("x", {}).render([])
