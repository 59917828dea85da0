"""A CUDA device does what every device must do."""

from pathlib import Path
from typing import Any

import pytest
from tests.transfer.cuda_rig import Rig

from transfer._work import Copy, FileRemove, Launch
from transfer.cuda import Way
from transfer.testing import Subject, check_device


@pytest.mark.parametrize("way", [Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED])
def test_every_check_of_the_kit(way: Way) -> None:
    """A device for each check, all on the same pages and slots."""
    first = Rig(manual=False, start=False, blocks=200)
    rigs = [first]

    def make() -> Any:
        made = Rig(manual=False, start=False, blocks=1, ways=(way,))
        rigs.append(made)
        return made.device

    def work(number: int) -> Copy:
        return first.copy(1, number)

    def failing() -> Launch:
        def broken(_stream: object) -> None:
            raise ValueError("broken")

        return Launch(broken, writes=(first.leased(first.gpu)[:1],), on="cuda:0")

    subject = Subject(
        make=make,
        work=work,
        done=lambda number: first.same(
            Copy(
                first.leased(first.gpu)[number : number + 1],
                first.leased(first.host)[number : number + 1],
            )
        ),
        failing=failing,
        wrong=lambda: FileRemove(Path("/nowhere")),
    )
    names = check_device(subject)
    assert len(names) >= 5, names
    for rig in rigs:
        rig.driver.stop()
