"""What the demonstration calls wrong, and how it says so."""

from __future__ import annotations

from rich.console import Console

from kvhold.demo_report import Report, phase_of, render
from kvhold.serving import Answer


def answer(name: str, tokens: list[int], bits: int, restored: int, first: float = 0.1) -> Answer:
    return Answer(name, tokens, bits, wanted=4, restored=restored, computed=3, first=first)


EXPECTED = {name: answer(name, [1, 2], 7, 0) for name in ("a", "b", "c")}


def report(*answers: Answer, engine: str = "kvhold") -> Report:
    made = Report(model={"name": "m"}, settings={}, engine=engine)
    made.phases.append(phase_of("a round", answers, EXPECTED, 1.5))
    return made


def test_answers_are_compared_by_tokens_and_by_bits() -> None:
    found = report(
        answer("a", [1, 2], 7, 4, first=0.1),
        answer("b", [1, 2], 8, 2, first=0.3),
        answer("c", [1, 3], 9, 0, first=0.2),
    )
    (phase,) = found.phases
    assert (phase.restored, phase.in_part, phase.computed) == (1, 1, 1)
    assert (phase.pages, phase.tokens, phase.wrong, phase.bits) == (6, 9, 1, 2)
    assert phase.first_ms == 200.0
    assert (found.wrong, found.right) == (1, False)


def test_other_bits_alone_are_not_right() -> None:
    found = report(answer("a", [1, 2], 8, 4))
    assert (found.wrong, found.right) == (0, False)
    assert found.as_json()["right"] is False
    assert report(answer("a", [1, 2], 7, 4)).right


def test_nothing_answered_is_not_right() -> None:
    assert not Report(model={}, settings={}, engine="kvhold").right


def shown(found: Report) -> str:
    console = Console(width=80)
    with console.capture() as text:
        console.print(render(found))
    return text.get()


def test_the_table_says_what_happened_and_its_verdict() -> None:
    good = report(answer("a", [1, 2], 7, 4))
    good.faults = {"fetch cancelled under way": 3}
    good.leftover = 5
    text = shown(good)
    assert "1+0+0" in text
    assert "3 fetch cancelled under way" in text
    assert "held until quiet" in " ".join(text.split())
    assert "✓ 1 answers, 0 wrong" in text
    bad = report(answer("a", [9, 9], 1, 4), engine="naive")
    bad.leftover = 5
    assert "✗ 1 answers, 1 wrong, 1 with other bits" in shown(bad)
    assert "were reused" in " ".join(shown(bad).split())
