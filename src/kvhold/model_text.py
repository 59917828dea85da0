"""Real text that a package ships: 300 news documents of gensim's test corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvhold.model import ModelError, packaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvhold.model import LanguageModel

CORPUS: Final = ("gensim", "lee_background.cor")


def articles(file: Path | None = None) -> list[str]:
    """News documents of a few hundred words, one a line.

    Args:
        file: other text, a document a line; the Lee corpus of the distribution gensim if None.

    Raises:
        ModelError: the text is not there, or is no text.
    """
    path = file or packaged(*CORPUS, "pip install --no-deps gensim, or --text FILE")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is no text: {error}") from error
    return [line for line in lines if line.strip()]


def documents(
    model: LanguageModel, texts: list[str], *, tokens: int, count: int
) -> list[list[int]]:
    """Documents of equal length: consecutive articles up to `tokens` tokens, then the next ones.

    Args:
        model: whose tokens.
        texts: articles.
        tokens: length of each document.
        count: how many.

    Raises:
        ModelError: there is not enough text.
    """
    found = []
    for document in _filled(model, texts, tokens):
        found.append(document)
        if len(found) == count:
            return found
    raise ModelError(
        f"the text gives {len(found)} documents of {tokens} tokens, {count} are wanted"
    )


def _filled(model: LanguageModel, texts: list[str], tokens: int) -> Iterator[list[int]]:
    document: list[int] = []
    for text in texts:
        document += model.encode(text + "\n\n")
        if len(document) >= tokens:
            yield document[:tokens]
            document = []
