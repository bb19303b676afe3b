import json
from typing import Any

import pytest
import tokenizers

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.tokenizer import FastTokenizer, SpecialIds, StopTexts, load_tokenizer

NOTHING_SPECIAL = SpecialIds(eos=frozenset(), never_sampled=frozenset())


def test_text_goes_to_ids_and_back_without_special_tokens(model: Any):
    tokenizer = load_tokenizer(model.folder)
    assert tokenizer.encode("dbca>") == [6, 4, 5, 3, 13]
    assert tokenizer.decode([1, 6, 4, 5, 3, 2, 0]) == "dbca"
    assert tokenizer.vocab_size == 14


def test_special_ids_come_from_all_files_of_the_model(model: Any):
    tokenizer = load_tokenizer(model.folder)
    assert tokenizer.special_ids.eos == {2}
    assert tokenizer.special_ids.never_sampled == {0, 1}
    (model.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 13]}))
    (model.folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "a"}, "pad_token": "</s>"})
    )
    special = load_tokenizer(model.folder).special_ids
    assert special.eos == {2, 3, 13}
    assert special.never_sampled == {0, 1}


def test_a_directory_without_tokenizer_is_named(model: Any):
    (model.folder / "tokenizer.json").unlink()
    with pytest.raises(AstraflowError, match=r"tokenizer\.json does not exist") as caught:
        load_tokenizer(model.folder)
    assert caught.value.reason is Reason.INVALID_FIELD


def test_a_file_that_is_no_tokenizer_is_named(model: Any):
    (model.folder / "tokenizer.json").write_text("{}")
    with pytest.raises(AstraflowError, match="is no tokenizer"):
        load_tokenizer(model.folder)


def test_a_character_without_a_token_is_named():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    with pytest.raises(AstraflowError, match=r"no token for \['N', 'o'\] in 'Noab'") as caught:
        FastTokenizer(words, NOTHING_SPECIAL).encode("Noab")
    assert caught.value.reason is Reason.INVALID_FIELD


def test_half_of_a_surrogate_pair_is_the_replacement_character():
    ids = {"a": 0, "\ufffd": 1, "\U0001f600": 2}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer = FastTokenizer(words, NOTHING_SPECIAL)
    assert tokenizer.encode("a\ud83da\udc80") == [0, 1, 0, 1]
    assert tokenizer.encode("a\ud83d" + "\ude00") == [0, 2]


@pytest.mark.parametrize("stop", ["\u3002", "b\u3002", "\u3002c", "c"])
def test_a_stop_text_is_found_at_its_last_token_where_tokens_are_single_bytes(stop: str):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: n for n, letter in enumerate(alphabet)}, [])
    of_bytes = tokenizers.Tokenizer(model)
    of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = FastTokenizer(of_bytes, NOTHING_SPECIAL)
    text = "ab\u3002c"
    end = len(text[: text.index(stop) + len(stop)].encode())
    assert StopTexts(tokenizer, [stop]).first_end(tokenizer.encode(text + "d")) == end
