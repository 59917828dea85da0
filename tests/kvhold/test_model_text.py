"""Text: what a package ships or a file has, cut into documents of equal length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kvhold import tiny

from kvhold.model import ModelError
from kvhold.model_text import articles, documents

if TYPE_CHECKING:
    from pathlib import Path


def test_the_packaged_corpus_is_real_news() -> None:
    texts = articles()
    assert len(texts) == 300
    assert min(map(len, texts)) > 100


def test_documents_are_consecutive_articles_of_one_length(tmp_path: Path) -> None:
    model = tiny.model()
    texts = articles(tiny.text(tmp_path / "text", documents=9, words=30))
    found = documents(model, texts, tokens=50, count=3)
    assert [len(document) for document in found] == [50, 50, 50]
    everything = [model.encode(text) for text in texts]
    assert found[0] == (everything[0] + everything[1])[:50]
    assert found[1] == (everything[2] + everything[3])[:50]


def test_too_little_text_is_one_line(tmp_path: Path) -> None:
    texts = articles(tiny.text(tmp_path / "text", documents=4, words=30))
    with pytest.raises(ModelError, match="gives 2 documents of 50 tokens, 3 are wanted"):
        documents(tiny.model(), texts, tokens=50, count=3)


def test_what_is_no_text_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing cannot be read: No such file or directory"):
        articles(tmp_path / "nothing")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ModelError, match="is no text"):
        articles(tmp_path / "bytes")
