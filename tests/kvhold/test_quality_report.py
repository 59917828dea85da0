"""What is believed of a measurement, and what its tables say."""

from __future__ import annotations

from rich.console import Console
from tests.kvhold import reports

from kvhold.quality_report import is_sound, render


def test_a_measurement_is_believed_only_whole() -> None:
    assert is_sound(reports.quality())
    unequal = reports.quality() | {"batches_restored_equal": 1}
    assert not is_sound(unequal)
    silent = reports.quality()
    silent["formats"]["K16/V8 restored"]["kl"]["mean"] = 0.0
    assert not is_sound(silent)
    unseen = reports.quality()
    unseen["mutations"][1]["bits_differ"] = False
    assert not is_sound(unseen)
    moved = reports.quality()
    moved["mutations"][0]["bits_differ"] = True
    assert not is_sound(moved)
    assert not is_sound(reports.quality() | {"mutations": []})


def text(report: dict[str, object]) -> str:
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as found:
        console.print(render(report))
    return found.get()


def test_the_table_has_every_figure_with_its_interval() -> None:
    shown = text(reports.quality())
    assert "5.00e-04 [4.50e-04, 5.50e-04]" in shown
    assert "0.9700 [0.9600, 0.9800]" in shown
    assert "10.0 [9.0, 11.0]" in shown
    assert "2 of 2 batches" in shown
    assert "✓ the restored cache is what was read" in shown


def test_figures_that_prove_nothing_say_so() -> None:
    assert "✗ these figures prove nothing" in text(
        reports.quality() | {"batches_restored_equal": 0}
    )
