import json

import pytest

from astraflow.workflows.tutors import BOS_ID, EOS_ID, PAD_ID, vocabulary, write_tokenizer


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path, "abc>!")
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_a_text_starts_with_bos(tokenizer):
    assert tokenizer.encode("ca>").ids == [BOS_ID, 5, 3, 6]
    assert tokenizer.encode("ca>", add_special_tokens=False).ids == [5, 3, 6]


def test_special_tokens_can_be_spelled_out(tokenizer):
    assert tokenizer.encode("a<eos>!", add_special_tokens=False).ids == [3, EOS_ID, 7]


def test_decoding_gives_the_text_back(tokenizer):
    assert tokenizer.decode([BOS_ID, 5, 3, 6, EOS_ID, PAD_ID]) == "ca>"
    assert tokenizer.decode([5, EOS_ID], skip_special_tokens=False) == "c<eos>"


def test_a_character_outside_the_alphabet_is_an_error(tokenizer):
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("z")


def test_the_settings_name_the_special_tokens(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<bos>", "<eos>")


@pytest.mark.slow
def test_transformers_loads_it(folder):
    transformers = pytest.importorskip("transformers")
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert loaded("ca>")["input_ids"] == [BOS_ID, 5, 3, 6]
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
    assert loaded.decode([5, 3, EOS_ID], skip_special_tokens=True) == "ca"


def test_a_character_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        vocabulary("aba")
