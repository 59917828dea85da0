"""The child of a crash campaign: opens a store, checks what is there, works until it is killed.

``python -m kvhold.campaigns.crash_child`` is a server that has imported everything and forks a child
for each line on its input, since importing takes seconds and forking milliseconds. Children write
lines to the server's output; a line is shorter than what a pipe takes in one piece.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel

from kvhold.campaigns.store_pages import LAYOUT, fill, keys_of, poison, versions_of
from tiers import DiskTier, HostTier, KVStore, Placement, PutFailed
from tiers._form import Form
from transfer import Engine, FileDevice, HostDevice, HostPool

if TYPE_CHECKING:
    from transfer import Blocks

SEQUENCES: Final = 12
PAGES: Final = 3
VERSIONS: Final = 4
FILES: Final = 48


def say(*words: object) -> None:
    """Write a line in one call, so that lines of several children do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Child:
    """One life.

    Args:
        root: the folder.
        seed: of what it does.
        placement: of its store; the folder is the same for all.
        alone: whether no other child lives, so that every file has to be readable.
        final: whether it only checks, and then counts files.
    """

    def __init__(self, root: str, seed: int, placement: str, *, alone: bool, final: bool) -> None:
        self.root = Path(root)
        self.random = random.Random(seed)
        self.placement = Placement(placement)
        self.alone = alone
        self.final = final

    async def run(self) -> None:
        """Check, then work until killed."""
        form = Form(LAYOUT, self.placement)
        host = HostTier.of(form.stored, form.host_names, blocks=FILES) if form.host_names else None
        disk = DiskTier(self.root, quota=FILES * form.file_bytes, shared=True)
        self.pool = HostPool(LAYOUT, PAGES)
        async with (
            Engine(HostDevice(threads=1), FileDevice(threads=2)) as engine,
            KVStore(engine, layout=LAYOUT, placement=self.placement, host=host, disk=disk) as store,
        ):
            self.store = store
            await store.recovered()
            adopted = store.statistics().adopted
            with self.pool.lease(PAGES) as blocks:
                await self.check(blocks)
                if self.final:
                    await self.count(adopted)
                    return
                statistics = store.statistics()
                say("reclaimed", statistics.temporaries_removed, statistics.orphans_removed)
                say("working", adopted)
                while True:
                    await self.step(blocks)

    async def check(self, blocks: Blocks) -> None:
        """Every page that is there has bytes that were put; split pages are gone."""
        pages = 0
        for sequence in range(SEQUENCES):
            keys = keys_of(sequence, PAGES)
            with self.store.lookup(keys) as hit:
                if self.placement is Placement.SPLIT and len(hit):
                    say("wrong", f"a split hit of {len(hit)} pages after a restart")
                poison(blocks)
                count = await self.store.fetch(hit, into=blocks)
                if count < len(hit) and self.alone:
                    say("unreadable", f"{count} of {len(hit)} pages of sequence {sequence}")
                if None in versions_of(blocks, keys, count, VERSIONS):
                    say("wrong", f"bytes of sequence {sequence}")
                pages += count
        say("checked", pages)

    async def count(self, adopted: int) -> None:
        """At the very end: no temporary, nothing set aside, every file known and whole."""
        report = await self.store.verify()
        files = [path.name for path in self.root.glob("data/*/*")]
        say("left", sum(name.endswith(".tmp") for name in files))
        say("final", len(files), adopted, report.checked, len(report.damaged))
        say("aside", sum(1 for _ in self.root.glob("aside/*")))
        say("done", 0)

    async def step(self, blocks: Blocks) -> None:
        """Put, remove, evict or read a little."""
        sequence, pages = self.random.randrange(SEQUENCES), self.random.randint(1, PAGES)
        keys = keys_of(sequence, pages)
        verb = self.random.random()
        if verb < 0.6:
            poison(blocks)
            fill(blocks[:pages], keys, self.random.randrange(VERSIONS))
            ticket = await self.store.put(keys, blocks)
            if verb < 0.2:
                try:
                    await ticket.resident()
                except PutFailed:
                    say("refused", len(ticket.refused))
        elif verb < 0.75:
            self.store.remove(keys)
        elif verb < 0.85:
            self.store.evict(2)
        else:
            with self.store.lookup(keys) as hit:
                count = await self.store.fetch(hit, into=blocks)
            if None in versions_of(blocks, keys, count, VERSIONS):
                say("wrong", f"bytes of sequence {sequence} while working")
        await anyio.lowlevel.checkpoint()


def live(order: dict[str, Any]) -> None:
    """The life of a forked child."""
    import torch  # noqa: PLC0415 - imported by the server, set up in the child

    torch.set_num_threads(1)
    logging.getLogger("kvhold").setLevel(logging.ERROR)
    child = Child(
        order["root"],
        order["seed"],
        order["placement"],
        alone=order["alone"],
        final=order["final"],
    )
    anyio.run(child.run)


def serve() -> None:
    """Fork a child for each line of input; ``reap <pid>`` waits for one."""
    import torch  # noqa: PLC0415 - what the children need is imported here, once

    say("serving", torch.__version__)
    for line in sys.stdin:
        if line.startswith("reap"):
            _, status = os.waitpid(int(line.split()[1]), 0)
            say("reaped", os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                say("begun", os.getpid())
                live(json.loads(line))
                code = 0
            finally:
                os._exit(code)


if __name__ == "__main__":
    serve()
