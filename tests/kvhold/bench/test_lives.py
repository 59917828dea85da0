"""The ledger's benchmark really lives whole lives."""

from __future__ import annotations

import pytest

from kvhold.bench import lives
from transfer._ledger import Ledger


@pytest.mark.parametrize("shuffled", [False, True])
def test_every_life_is_prepared_and_completed(
    shuffled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    complete = Ledger.complete

    def counted(self: Ledger, completion: object) -> None:
        complete(self, completion)  # type: ignore[arg-type]
        ended.append(self.stray_completions)

    monkeypatch.setattr(Ledger, "complete", counted)
    assert lives.microseconds(10, shuffled=shuffled, lives=50) > 0
    assert len(ended) == 10 * 50
    assert ended[-1] == 0
