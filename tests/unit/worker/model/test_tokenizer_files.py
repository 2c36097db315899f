from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from transformers import PreTrainedConfig

from tests.support.tiny_model import END, TEMPLATE, tiny_tokenizer
from worker.model import tokenizer_files
from worker.model.errors import ModelDamaged

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def put(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer_files.read(directory).config)
    return found


class TestTemplate:
    """One string, wherever it was."""

    def test_none_is_none(self, directory: Path) -> None:
        assert config_of(directory) == {}

    def test_in_the_configuration(self, directory: Path) -> None:
        put(directory, "tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": END})
        assert config_of(directory) == {"chat_template": TEMPLATE, "eos_token": END}

    def test_in_a_file_of_its_own(self, directory: Path) -> None:
        put(directory, "tokenizer_config.json", {"chat_template": "old"})
        put(directory, "chat_template.jinja", TEMPLATE)
        assert config_of(directory)["chat_template"] == TEMPLATE

    def test_in_a_json_file(self, directory: Path) -> None:
        put(directory, "chat_template.json", {"chat_template": TEMPLATE})
        assert config_of(directory)["chat_template"] == TEMPLATE

    def test_one_of_several(self, directory: Path) -> None:
        named = [{"name": "rag", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        put(directory, "tokenizer_config.json", {"chat_template": named})
        assert config_of(directory)["chat_template"] == TEMPLATE


def test_special_tokens_come_from_their_own_file_where_the_configuration_has_none(directory: Path) -> None:
    put(directory, "special_tokens_map.json", {"eos_token": {"content": END}, "bos_token": "<|start|>"})
    put(directory, "tokenizer_config.json", {"bos_token": END})
    assert config_of(directory) == {"bos_token": END, "eos_token": {"content": END}}
    assert tokenizer_files.read(directory).eos == 0


def test_the_size_counts_added_tokens(directory: Path) -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer.get_vocab_size()
    assert tokenizer_files.read(directory).size == before
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    assert tokenizer_files.read(directory).size == before + 1


@pytest.mark.parametrize(("longest", "expected"), [(1024, 1024), (10**30, None), (None, None)])
def test_the_longest_text(longest: int | None, expected: int | None, directory: Path) -> None:
    put(directory, "tokenizer_config.json", {"model_max_length": longest})
    assert tokenizer_files.read(directory).longest == expected


class TestEos:
    """Every id that anybody calls an end."""

    def ids(self, directory: Path, eos: Any = None) -> tuple[int, ...]:
        return tokenizer_files.eos_token_ids(
            directory, PreTrainedConfig(eos_token_id=eos), tokenizer_files.read(directory)
        )

    def test_all_three_places_count(self, directory: Path) -> None:
        put(directory, "generation_config.json", {"eos_token_id": [7, 3]})
        put(directory, "tokenizer_config.json", {"eos_token": END})
        assert self.ids(directory, eos=5) == (0, 3, 5, 7)

    def test_ids_that_no_token_has_do_not(self, directory: Path) -> None:
        put(directory, "generation_config.json", {"eos_token_id": [-1, 10**6, 3]})
        assert self.ids(directory) == (3,)

    def test_there_may_be_none(self, directory: Path) -> None:
        assert self.ids(directory) == ()


class TestDamage:
    """Named with the file."""

    @pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"])
    @pytest.mark.parametrize("content", ["{", "[]"])
    def test_a_file_that_holds_no_object(self, name: str, content: str, directory: Path) -> None:
        put(directory, name, content)
        with pytest.raises(ModelDamaged, match=name.replace(".", r"\.")):
            tokenizer_files.read(directory)

    def test_a_tokenizer_cut_short(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(ModelDamaged, match=r"tokenizer\.json"):
            tokenizer_files.read(directory)

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ModelDamaged, match=r"has no tokenizer\.json, and none could be made"):
            tokenizer_files.read(tmp_path)
