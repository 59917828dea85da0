"""The state table of the documentation is the table that runs."""

from pathlib import Path

from transfer import TRANSITIONS, Event, State

PAGE = Path(__file__).parent.parent / "docs" / "states.md"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_documented_table_is_the_program() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| state | SUBMIT"))
    events = [Event[name] for name in cells(lines[start])[1:]]
    table = {}
    for line in lines[start + 2 : start + 2 + len(State)]:
        state, *targets = cells(line)
        row = zip(events, targets, strict=True)
        table[State[state]] = {event: State[name] for event, name in row if name}
    assert events == list(Event)
    assert table == {state: dict(row) for state, row in TRANSITIONS.items()}
