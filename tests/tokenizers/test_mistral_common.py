"""Two tokenizers beside Mistral's own code, which has no tokenizer.json."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_async.tokenizer.tokenizer import Tokenizer
from tests.support import real_tokenizers
from tests.tokenizers.conftest import available
from tests.tokenizers.generated import texts

TEXTS = texts(2000, special=False)
"""Mistral's code reads no special tokens in texts."""


@pytest.fixture(scope="module")
def mistral() -> Any:
    """Mistral's tokenizers by version."""
    folder = available(real_tokenizers.mistral_packages)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
        yield module.MistralTokenizer


def ours(name: str) -> Tokenizer:
    directory = available(lambda: real_tokenizers.tokenizer_directory(name))
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("name", ["llama2", "mistral_nemo"])
def test_ids_and_texts_are_those_of_mistral(mistral: Any, name: str) -> None:
    made = mistral.v1() if name == "llama2" else mistral.v3(is_tekken=True)
    theirs, tokenizer = made.instruct_tokenizer.tokenizer, ours(name)
    for text in TEXTS:
        ids = theirs.encode(text, bos=False, eos=False)
        assert tokenizer.tokenize(text) == ids, text
        assert tokenizer.detokenize(ids) == theirs.decode(ids), ids
