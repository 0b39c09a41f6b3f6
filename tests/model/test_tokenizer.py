"""Opening a checkpoint's tokenizer, encoding, and the ids that stop a generation (case B7)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from cupyllm.errors import CheckpointError, InputError
from cupyllm.model.tokenizer import Tokenizer, read_stop_ids
from cupyllm.text import open_codec

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tokenizer"
END_OF_TEXT, IM_START, IM_END, THINK = 270, 271, 272, 294


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE, tmp_path / "model")
    return tmp_path / "model"


def write(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


def change(path: Path, **values: Any) -> None:
    write(path, **{**json.loads(path.read_text("utf-8")), **values})


# ---- what is known of a tokenizer ----


def test_size_and_special_tokens() -> None:
    tokenizer = Tokenizer.open(FIXTURE)
    assert tokenizer.size == 296
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, IM_END, END_OF_TEXT)
    assert tokenizer.named_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert len(tokenizer.added_tokens) == 26 and len(tokenizer.special_ids) == 14
    assert tokenizer.added_tokens["<think>"] == tokenizer.token_id("<think>") == THINK
    assert THINK not in tokenizer.special_ids and IM_START in tokenizer.special_ids
    assert tokenizer.token(THINK) == "<think>" and tokenizer.token_id("<nothing>") is None
    assert tokenizer.notes == []


def test_encode_and_decode() -> None:
    tokenizer = Tokenizer.open(FIXTURE)
    text = "the other thing, 12 é 汉字 😀\n"
    ids = tokenizer.encode(text)
    assert ids == Backend.from_file(str(FIXTURE / "tokenizer.json")).encode(text).ids
    assert len(ids) < len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_names_of_special_tokens_in_text() -> None:
    tokenizer = Tokenizer.open(FIXTURE)
    text = "<|im_start|>a<think>b"
    assert tokenizer.encode(text) == [IM_START, ord("a"), THINK, ord("b")]
    plain = tokenizer.encode(text, allow_special=False)
    assert max(plain) < 270 and tokenizer.decode(plain) == text
    assert tokenizer.decode(tokenizer.encode(text)) == "a<think>b"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_what_the_tokenizer_adds_around_a_text(directory: Path) -> None:
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", END_OF_TEXT)]
    )
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer.open(directory)
    assert tokenizer.encode("a") == [END_OF_TEXT, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.encode("a", allow_special=False) == [END_OF_TEXT, 97]
    assert (
        tokenizer.encode_chat([{"role": "user", "content": "a"}])[0] == IM_START
    )  # the template says what comes first


def test_truncation_and_padding_in_the_file_are_not_obeyed(directory: Path) -> None:
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    for allow in (True, False):
        assert len(Tokenizer.open(directory).encode("abcde", allow_special=allow)) == 5


def test_text_that_is_no_unicode() -> None:
    with pytest.raises(InputError, match="character 1 is not valid UTF-8"):
        Tokenizer.open(FIXTURE).encode("a\udc80")


def test_a_file_or_a_directory(directory: Path) -> None:
    assert Tokenizer.open(directory / "tokenizer.json").eos_id == Tokenizer.open(str(directory)).eos_id == IM_END


def test_tokens_as_objects_and_in_the_older_file(directory: Path) -> None:
    settings = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    del settings["eos_token"]
    write(directory / "tokenizer_config.json", **{**settings, "bos_token": {"content": "<|im_start|>"}})
    write(directory / "special_tokens_map.json", eos_token={"content": "<|endoftext|>"}, pad_token="<|im_end|>")
    tokenizer = Tokenizer.open(directory)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (IM_START, END_OF_TEXT, END_OF_TEXT)
    (directory / "tokenizer_config.json").unlink()
    assert Tokenizer.open(directory).pad_id == IM_END


def test_a_named_token_that_is_not_there_is_noted(directory: Path) -> None:
    change(directory / "tokenizer_config.json", eos_token="</s>")
    tokenizer = Tokenizer.open(directory)
    assert tokenizer.eos_id is None and tokenizer.stop_ids == ()
    assert len(tokenizer.notes) == 1 and "no token '</s>', the eos_token" in tokenizer.notes[0]


# ---- chat templates beside it ----


def test_the_jinja_file_comes_first(directory: Path) -> None:
    message = [{"role": "user", "content": "x"}]
    (directory / "chat_template.jinja").write_text("J{{ eos_token }}", encoding="utf-8")
    assert Tokenizer.open(directory).chat_template.render(message) == "J<|im_end|>"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("T", encoding="utf-8")
    assert Tokenizer.open(directory).chat_template.render(message, tools=[{}]) == "T"
    assert Tokenizer.open(directory).chat_template.render(message) == "J<|im_end|>"


def test_no_template(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.open(directory)
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match=r"no chat template, expected .* --prompt"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


# ---- B7: what stops ----


def config(directory: Path, **values: Any) -> None:
    write(directory / "config.json", vocab_size=320, **values)


def test_b7_the_union_of_all_three(directory: Path) -> None:
    config(directory, eos_token_id=IM_END)
    write(directory / "generation_config.json", eos_token_id=[IM_END, END_OF_TEXT])
    change(directory / "tokenizer_config.json", eos_token="</think>")
    assert Tokenizer.open(directory).stop_ids == (END_OF_TEXT, IM_END, 295)


def test_b7_any_may_be_absent(directory: Path) -> None:
    assert Tokenizer.open(directory).stop_ids == (IM_END,)  # the tokenizer's own alone
    config(directory, eos_token_id=END_OF_TEXT)
    assert Tokenizer.open(directory).stop_ids == (END_OF_TEXT, IM_END)  # a scalar joins it
    config(directory)
    write(directory / "generation_config.json", eos_token_id=None)
    assert Tokenizer.open(directory).stop_ids == (IM_END,)


def test_b7_ids_outside_the_vocabulary_are_noted(directory: Path) -> None:
    config(directory, eos_token_id=[151645, -1, IM_END])
    write(directory / "generation_config.json", eos_token_id=320)
    tokenizer = Tokenizer.open(directory)
    assert tokenizer.stop_ids == (IM_END,)
    assert [note.split("eos_token_id ")[1] for note in tokenizer.notes] == [
        f"{number} is outside the vocabulary of 320 and is ignored" for number in (151645, -1, 320)
    ]


def test_b7_without_a_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "config.json", eos_token_id=5)
    write(tmp_path / "generation_config.json", eos_token_id=[5, 7, 400])
    notes: list[str] = []
    assert read_stop_ids(tmp_path, 320, None, notes) == (5, 7)
    assert len(notes) == 1
    assert read_stop_ids(tmp_path, 320, 400, notes) == (5, 7)
    assert "the tokenizer's eos 400" in notes[-1]


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, None], {"id": 2}])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_b7_what_is_no_id_is_refused(directory: Path, name: str, value: Any) -> None:
    write(directory / name, eos_token_id=value)
    with pytest.raises(CheckpointError, match=f"{name}: eos_token_id is .* expected an integer"):
        Tokenizer.open(directory)


# ---- damage ----


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("tokenizer.json", b"{}", "is not a tokenizer.json that can be read"),
        ("tokenizer.json", b"\xff", "is not UTF-8 at byte 0"),
        ("tokenizer.json", b"", "is not a tokenizer.json that can be read"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "is not a tokenizer.json"),
        ("tokenizer_config.json", b"{", "is not valid JSON"),
        ("tokenizer_config.json", b"[]", "holds a JSON list, expected an object"),
        ("tokenizer_config.json", b'{"eos_token": 3}', "eos_token is 3, expected a string"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template holds 3"),
        ("generation_config.json", b"nonsense", "is not valid JSON"),
        ("special_tokens_map.json", b"3", "holds a JSON int"),
        ("config.json", b"\xff", "is not valid JSON"),
        ("chat_template.jinja", b"\xff", "is not UTF-8 at byte 0"),
    ],
)
def test_damaged_files_are_named(directory: Path, name: str, data: bytes, named: str) -> None:
    (directory / name).write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.open(directory)
    assert name in str(caught.value) and named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_dangling_links_and_directories_are_named(directory: Path, name: str) -> None:
    path = directory / name
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=f"{name} is a symbolic link to nowhere"):
        Tokenizer.open(directory)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}: Is a directory"):
        Tokenizer.open(directory)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json does not exist; .* give token ids"):
        Tokenizer.open(tmp_path)


def test_a_vocabulary_without_tokens(directory: Path) -> None:
    document = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    document["added_tokens"], document["model"]["vocab"], document["model"]["merges"] = [], {}, []
    (directory / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="has no tokens"):
        Tokenizer.open(directory)


# ---- the codec that forward and train-smoke use ----


def test_the_codec_is_built_on_it() -> None:
    codec = open_codec(FIXTURE / "tokenizer.json", 320)
    assert codec.description == "tokenizer.json" and codec.valid_vocab == 296
    assert codec.encode("a<think>").tolist() == [97, THINK]
    half = Tokenizer.open(FIXTURE).encode("😀")[0]
    assert [codec.decode(i) for i in (97, THINK, half, 296, 319)] == ["a", "<think>", "\ufffd", "<296>", "<319>"]
