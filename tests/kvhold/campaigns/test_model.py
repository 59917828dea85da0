"""The model of bytes: what is undefined, what is untouched, and what it reports."""

from typing import cast

from kvhold.campaigns._model import Cell, Model, Record, Version
from transfer import Block, Event, State, Transition

A, B = b"aaaa", b"bbbb"


def cell(content: bytes | None = None) -> Cell:
    made = Cell(cast("Block", None), None)
    made.version = Version(content)
    return made


class Story:
    """A model, told step by step."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, str]] = []
        self.model = Model(
            lambda kind, what: self.reports.append((kind, what)), lambda _a, _b: False
        )

    def copy(self, name: str, src: Cell, dst: Cell, *after: Record) -> Record:
        record = Record(name, [src], [dst], lambda reads, _olds: [*reads], [*after], "host")
        return self.model.add(record)

    def tell(self, record: Record, *steps: tuple[Event, State]) -> None:
        for event, after in steps:
            self.model(Transition(1, record.name, "host", record.state, event, after))


SUBMIT = (Event.SUBMIT, State.IN_FLIGHT)
COMPLETE = (Event.COMPLETE, State.COMPLETED)
FAIL = (Event.FAIL, State.FAILED)


def test_a_completed_copy_carries_what_its_source_was_when_asked_for() -> None:
    story, src, dst = Story(), cell(A), cell(B)
    first = story.copy("1", src, dst)
    second = story.copy("2", dst, src, first)
    assert not dst.checkable
    story.tell(first, SUBMIT, COMPLETE)
    story.tell(second, SUBMIT, COMPLETE)
    assert (src.content, dst.content) == (A, A)
    assert src.checkable
    assert story.reports == []


def test_failed_is_undefined_and_never_posted_is_untouched() -> None:
    story, src, dst = Story(), cell(A), cell(B)
    story.tell(story.copy("1", src, dst), (Event.CANCEL, State.CANCELLED))
    found = [dst.content]
    story.model.refuse(story.copy("2", src, dst))
    found.append(dst.content)
    story.tell(story.copy("3", src, dst), SUBMIT, FAIL)
    found.append(dst.content)
    assert found == [B, B, None]
    assert not dst.promising


def test_it_reports_order_that_was_broken() -> None:
    story, src, dst, other = Story(), cell(A), cell(B), cell(B)
    first = story.copy("1", src, dst)
    second = story.copy("2", dst, other, first)
    story.tell(second, SUBMIT)
    assert story.reports == [("order", "2 was posted before 1")]
    story.tell(second, COMPLETE)
    assert ("order", "2 completed before 1") in story.reports


def test_it_reports_success_that_cannot_be() -> None:
    story, src, dst, other = Story(), cell(A), cell(B), cell(B)
    lost = story.copy("1", src, dst)
    story.tell(lost, SUBMIT, (Event.LOSE, State.QUARANTINED))
    behind = story.copy("2", dst, other, lost)
    story.tell(behind, SUBMIT, COMPLETE)
    assert {kind for kind, _ in story.reports} == {"order", "outcome"}
    story.reports.clear()
    story.tell(lost, (Event.QUIESCE, State.COMPLETED))
    assert story.reports == [("outcome", "1 was lost and completed")]


def test_what_excuses_a_failure() -> None:
    story, src, dst, other = Story(), cell(A), cell(B), cell(B)
    first = story.copy("1", src, dst)
    second = story.copy("2", dst, other, first)
    assert story.model.justified(second)
    story.tell(first, SUBMIT, COMPLETE)
    assert not story.model.justified(second)
    second.cancelled = True
    assert story.model.justified(second)
