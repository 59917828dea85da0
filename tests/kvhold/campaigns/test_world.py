"""The world: what its look at every byte sees."""

from pathlib import Path

from kvhold.campaigns._model import Cell, Version
from kvhold.campaigns._schedule import Schedule
from kvhold.campaigns._world import HALF, World
from transfer.testing import peek, poke


def leased(world: World) -> Cell:
    lease = world.pages.lease()
    cell = Cell(lease.handle, lease)
    world.cells[world.pages, cell.block.id] = cell
    return cell


def test_a_block_that_is_not_its_data_is_seen(tmp_path: Path) -> None:
    world = World(Schedule(1), tmp_path)
    cell = leased(world)
    cell.version = Version(peek(cell.block) + peek(cell.block, plane=1))
    world.check()
    assert world.violations == []
    poke(cell.block, b"!", plane=1)
    world.check()
    assert world.violations[0][0] == "bytes"


def test_a_block_that_is_being_written_is_not_looked_at(tmp_path: Path) -> None:
    world = World(Schedule(1), tmp_path)
    cell = leased(world)
    cell.version = Version(bytes(2 * HALF))
    cell.writers = 1
    world.check()
    assert world.violations == []
    assert world.checks == 1


def test_a_write_into_a_free_block_is_seen(tmp_path: Path) -> None:
    world = World(Schedule(1), tmp_path)
    lease = world.slots.lease()
    block = lease.handle
    lease.release()
    poke(block, b"!")
    world.check()
    assert world.violations[0][0] == "bytes"


def test_books_that_do_not_add_up_are_seen(tmp_path: Path) -> None:
    world = World(Schedule(1), tmp_path)
    world.slots.book.held[0] += 1
    world.check()
    assert {kind for kind, _ in world.violations} == {"books"}
    shallow = World(Schedule(1, deep=False), tmp_path)
    shallow.slots.book.held[0] += 1
    shallow.check()
    assert shallow.violations == []


def test_memory_used_after_it_was_given_back_is_seen(tmp_path: Path) -> None:
    world = World(Schedule(1), tmp_path)
    cell = leased(world)
    world.stream().fill(cell.block, b"!!")
    world.pages.storage.close()
    world.finish()
    world.check()
    assert [kind for kind, what in world.violations if "given back" in what] == ["bytes"]
