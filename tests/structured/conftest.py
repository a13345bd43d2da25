"""One small vocabulary, pool and compiled step for all tests of structured output."""

import pytest

from deepinfer_jax.structured import Vocabulary
from tests.structured.grammar_walk import EOS, WIDTH, Walker, write_tokenizer


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory) -> Vocabulary:
    path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Vocabulary.load(path, width=WIDTH, eos=[EOS])


@pytest.fixture(scope="session")
def walker(vocabulary) -> Walker:
    return Walker(vocabulary)
