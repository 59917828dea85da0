"""What users can put right has one ancestor, so that commands can say it in one line."""

from __future__ import annotations

from kvhold._errors import UserError
from kvhold.model import ModelError


def test_a_model_that_cannot_be_had_is_for_the_user() -> None:
    assert issubclass(ModelError, UserError)
    assert str(ModelError("in one line")) == "in one line"
