"""Opening a model: what a folder or GGUF file yields, and what is said when a part is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import CheckpointError

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def with_bos(tokenizer: Tokenizer, single: str = "<|im_start|> $A") -> Tokenizer:
    """As Llama tokenizers are saved: the post-processor puts a BOS in front."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2), ("<unk>", 0)]
    )
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path, tiny) -> Path:
    return tiny.folder(
        tmp_path / "model",
        tiny.model(),
        generation_config={"eos_token_id": [2, 7], "temperature": 0.6},
        tokenizer_config={
            "bos_token": {"content": "<|im_start|>"},
            "eos_token": "<|im_end|>",
            "chat_template": TEMPLATE,
        },
    )


@pytest.fixture
def gguf_file(tmp_path: Path, tiny) -> Path:
    vocabulary = tiny.vocabulary(tiny.byte_level(), "gpt-2")
    vocabulary.extra |= {"add_bos_token": True}
    return tiny.gguf(
        tmp_path / "m.gguf",
        tiny.model(),
        vocabulary,
        extra=lambda w: w.add_string("tokenizer.chat_template", TEMPLATE),
    )


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# What there is


def test_a_folder_yields_all_its_parts(folder: Path, tiny):
    checkpoint = open_checkpoint(folder)
    assert checkpoint.path == folder
    assert checkpoint.config == tiny.model().config
    assert sorted(checkpoint.source.names()) == sorted(tiny.model().tensors)
    assert checkpoint.chat_template == TEMPLATE
    assert (checkpoint.bos_token, checkpoint.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert checkpoint.eos_token_ids == (2, 7)
    assert checkpoint.generation_config["temperature"] == 0.6
    assert checkpoint.add_bos is False
    assert checkpoint.tokenizer.encode("Paris").ids == tiny.byte_level().encode("Paris").ids


def test_a_gguf_file_yields_all_its_parts(gguf_file: Path, tiny):
    checkpoint = open_checkpoint(str(gguf_file))
    assert checkpoint.path == gguf_file
    assert checkpoint.config | tiny.model().config == checkpoint.config
    assert sorted(checkpoint.source.names()) == sorted(tiny.model().tensors)
    assert checkpoint.chat_template == TEMPLATE
    assert (checkpoint.bos_token, checkpoint.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.generation_config == {}
    assert checkpoint.add_bos is True
    for text in tiny.texts:
        assert checkpoint.tokenizer.encode(text).ids == tiny.byte_level().encode(text).ids


def test_a_folder_with_one_gguf_file_is_that_file(gguf_file: Path):
    assert open_checkpoint(gguf_file.parent).path == gguf_file


def test_closing_keeps_the_tokenizer(folder: Path):
    checkpoint = open_checkpoint(folder)
    checkpoint.close()
    assert checkpoint.tokenizer.encode("Paris").ids
    with pytest.raises(CheckpointError):
        checkpoint.source.read("model.norm.weight")


# BOS


def test_a_tokenizer_that_would_add_a_bos_is_stripped_and_says_so(tmp_path: Path, tiny):
    tokenizer = with_bos(tiny.byte_level())
    assert tokenizer.encode("Paris").ids[0] == 1
    files = {"tokenizer_config": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}}
    checkpoint = open_checkpoint(tiny.folder(tmp_path, tiny.model(), tokenizer, **files))
    assert checkpoint.add_bos is True
    assert checkpoint.tokenizer.encode("Paris").ids == tokenizer.encode("Paris").ids[1:]


def test_a_rendered_template_and_plain_text_have_one_bos_each(tmp_path: Path, tiny):
    files = {"tokenizer_config": {"bos_token": "<|im_start|>", "chat_template": TEMPLATE}}
    tokenizer = with_bos(tiny.byte_level())
    checkpoint = open_checkpoint(tiny.folder(tmp_path, tiny.model(), tokenizer, **files))
    rendered = "<|im_start|>" + "hi"  # the template writes its BOS itself
    assert checkpoint.tokenizer.encode(rendered).ids.count(1) == 1
    assert checkpoint.add_bos
    assert checkpoint.tokenizer.encode("hi").ids.count(1) == 0  # the caller adds it


def test_an_eos_behind_the_text_is_dropped(tmp_path: Path, tiny):
    tokenizer = with_bos(tiny.byte_level(), "<|im_start|> $A <|im_end|>")
    checkpoint = open_checkpoint(tiny.folder(tmp_path, tiny.model(), tokenizer))
    assert checkpoint.add_bos is True
    assert checkpoint.tokenizer.encode("a").ids == tiny.byte_level().encode("a").ids


def test_another_token_in_front_is_refused(tmp_path: Path, tiny):
    tokenizer = with_bos(tiny.byte_level(), "<unk> <|im_start|> $A")
    tiny.folder(tmp_path, tiny.model(), tokenizer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*found \['<unk>', '<\|im_start"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("flag", "expected"), [(True, True), (False, False), (None, False)])
def test_the_config_decides_about_the_bos_where_it_says_something(folder: Path, flag, expected):
    rewrite(folder / "tokenizer_config.json", add_bos_token=flag)
    assert open_checkpoint(folder).add_bos is expected


def test_without_a_bos_token_none_is_added(folder: Path):
    rewrite(folder / "tokenizer_config.json", add_bos_token=True, bos_token=None)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.bos_token is None
    assert checkpoint.add_bos is False


def test_tokens_come_from_the_ids_where_no_tokenizer_config_names_them(folder: Path):
    (folder / "tokenizer_config.json").unlink()
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.bos_token, checkpoint.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert checkpoint.chat_template is None


def test_truncation_left_in_the_tokenizer_is_undone(tmp_path: Path, tiny):
    tokenizer = tiny.byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    checkpoint = open_checkpoint(tiny.folder(tmp_path, tiny.model(), tokenizer))
    text = "The capital of France"
    assert checkpoint.tokenizer.encode(text).ids == tiny.byte_level().encode(text).ids


# End tokens and templates


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, (2,)), (2, 7, (2, 7)), ([2, 3], [7, 2], (2, 3, 7)), (None, None, (2,))],
)
def test_end_tokens_are_the_union(folder: Path, config, generation, expected):
    rewrite(folder / "config.json", eos_token_id=config)
    rewrite(folder / "generation_config.json", eos_token_id=generation)
    assert open_checkpoint(folder).eos_token_ids == expected  # 2: tokenizer_config's eos_token


@pytest.mark.parametrize("value", ["2", [2, None], -1, True, 1.5, {}])
def test_an_end_token_that_is_no_id_is_refused(folder: Path, value):
    rewrite(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: expected token ids"):
        open_checkpoint(folder)


def test_a_template_file_wins_over_the_config(folder: Path):
    (folder / "chat_template.jinja").write_text("from the file ü", "utf-8")
    assert open_checkpoint(folder).chat_template == "from the file ü"


def test_the_default_of_several_templates_is_taken(folder: Path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    rewrite(folder / "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(folder).chat_template == "d"
    rewrite(folder / "tokenizer_config.json", chat_template=named[:1])
    assert open_checkpoint(folder).chat_template is None


# Version


def test_the_version_names_the_content_and_not_the_place(folder: Path, tmp_path: Path):
    version = open_checkpoint(folder).version
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    assert open_checkpoint(copy).version == version
    weights = copy / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert open_checkpoint(copy).version != version


def test_the_version_changes_with_config_and_tokenizer(folder: Path, tiny):
    versions = {open_checkpoint(folder).version}
    rewrite(folder / "config.json", rope_theta=1.0)
    versions.add(open_checkpoint(folder).version)
    tiny.byte_level(vocab_size=300).save(str(folder / "tokenizer.json"))
    versions.add(open_checkpoint(folder).version)
    assert len(versions) == 3


def test_a_renamed_gguf_file_keeps_its_version(gguf_file: Path):
    version = open_checkpoint(gguf_file).version
    assert open_checkpoint(gguf_file.rename(gguf_file.with_name("n.gguf"))).version == version


# What is missing or broken: one line that names the file


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def test_nothing_there(tmp_path: Path):
    assert refused(tmp_path / "gone").endswith(
        "expected a folder or a GGUF file, found nothing there"
    )


def test_an_empty_folder(tmp_path: Path):
    assert "expected config.json (or one .gguf file), found neither" in refused(tmp_path)


def test_a_folder_without_config(folder: Path):
    (folder / "config.json").unlink()
    assert "expected config.json" in refused(folder)


def test_a_folder_with_two_gguf_files(gguf_file: Path):
    shutil.copy(gguf_file, gguf_file.with_name("n.gguf"))
    assert "found 2 (m.gguf, n.gguf); give the path of one" in refused(gguf_file.parent)


def test_a_folder_without_tokenizer(folder: Path):
    (folder / "tokenizer.json").unlink()
    assert "expected tokenizer.json, found none" in refused(folder)
    (folder / "tokenizer.model").touch()
    assert "found only tokenizer.model; save it as a fast tokenizer" in refused(folder)


def test_a_folder_without_weights(folder: Path):
    (folder / "model.safetensors").unlink()
    assert "found no weights" in refused(folder)


def test_a_weight_file_instead_of_its_folder(folder: Path):
    assert "give the folder that holds it" in refused(folder / "model.safetensors")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe\x00", b"[" * 200_000])
def test_a_broken_json_file(folder: Path, file: str, content: bytes):
    (folder / file).write_bytes(content)
    assert f"/{file}: expected" in refused(folder)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": {"type": "Nope"}}', b"\xff"])
def test_a_broken_tokenizer(folder: Path, content: bytes):
    (folder / "tokenizer.json").write_bytes(content)
    assert "/tokenizer.json: expected a tokenizer" in refused(folder)


@pytest.mark.parametrize("changes", [{"bos_token": 3}, {"eos_token": ["a"]}, {"chat_template": 3}])
def test_a_broken_tokenizer_config(folder: Path, changes: dict):
    rewrite(folder / "tokenizer_config.json", **changes)
    assert "/tokenizer_config.json: expected" in refused(folder)


def test_a_gguf_file_without_tokenizer(tmp_path: Path, tiny):
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model())
    assert "tokenizer.ggml.tokens' to be a list of texts, found none" in refused(path)


def test_a_gguf_file_with_more_tokens_than_rows(tmp_path: Path, tiny):
    vocabulary = tiny.vocabulary(tiny.byte_level(vocab_size=321), "gpt-2")
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(), vocabulary)
    assert "expected at most 320 tokens (rows of token_embd.weight), found 321" in refused(path)


def test_a_file_of_another_kind(tmp_path: Path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"PK\3\4" + bytes(100))
    assert "expected a GGUF file" in refused(path)


def test_damage_anywhere_in_the_head_is_one_line_or_opens(tmp_path: Path, gguf_file: Path):
    raw = gguf_file.read_bytes()
    head = gguf.GGUFReader(gguf_file).data_offset
    rng = np.random.default_rng(1)
    path = tmp_path / "damaged" / "d.gguf"
    path.parent.mkdir()
    refusals = []
    for _ in range(200):
        damaged = bytearray(raw)
        for at in rng.integers(0, head, size=2):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 50
    assert not any("\n" in message for message in refusals)
