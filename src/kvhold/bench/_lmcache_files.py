"""The other side of the files bench: LMCache's file-system adapter, in an environment of its own.

Run by that environment's interpreter as a script; it imports nothing of kvhold. Arguments: a folder, the
number of objects, their bytes, and ``direct`` or ``buffered``. Answers each line of standard input,
``store <round>`` or ``load <round>``, with the seconds that it took.
"""

from __future__ import annotations

import logging
import mmap
import select
import sys
import time

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig


class Object:
    """Memory that the adapter reads and writes."""

    def __init__(self, data: memoryview) -> None:
        self.byte_array = data

    def get_size(self) -> int:
        """Bytes."""
        return len(self.byte_array)


class Peer:
    """An adapter and objects for it."""

    def __init__(self, folder: str, count: int, nbytes: int, *, direct: bool) -> None:
        self.adapter = FSL2Adapter(FSL2AdapterConfig(folder, use_odirect=direct))
        data = memoryview(mmap.mmap(-1, count * nbytes))  # page-aligned, as direct I/O needs
        data[:] = b"\x5a" * len(data)
        self.objects = [Object(data[i * nbytes : (i + 1) * nbytes]) for i in range(count)]

    def _keys(self, number: int) -> list[ObjectKey]:
        return [
            ObjectKey(
                chunk_hash=number.to_bytes(8, "big") + index.to_bytes(24, "big"),
                model_name="m",
                kv_rank=0,
            )
            for index in range(len(self.objects))
        ]

    def store(self, number: int) -> float:
        """Seconds to store every object under new keys."""
        begun = time.perf_counter()
        self.adapter.submit_store_task(self._keys(number), self.objects)
        done: dict[int, object] = {}
        while not done:
            select.select([self.adapter.get_store_event_fd()], [], [])
            done = self.adapter.pop_completed_store_tasks()
        return time.perf_counter() - begun

    def load(self, number: int) -> float:
        """Seconds to load what a round stored."""
        begun = time.perf_counter()
        task = self.adapter.submit_load_task(self._keys(number), self.objects)
        while (found := self.adapter.query_load_result(task)) is None:
            select.select([self.adapter.get_load_event_fd()], [], [], 0.001)
        seconds = time.perf_counter() - begun
        if found.popcount() != len(self.objects):
            raise RuntimeError(f"{found.popcount()} of {len(self.objects)} objects came back")
        self.adapter.delete(self._keys(number))
        return seconds


def say(line: str) -> None:
    """Answer."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve standard input."""
    folder, count, nbytes, how = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    peer = Peer(folder, int(count), int(nbytes), direct=how == "direct")
    say("ready")
    for line in sys.stdin:
        verb, number = line.split()
        seconds = peer.store(int(number)) if verb == "store" else peer.load(int(number))
        say(f"seconds {seconds}")
    peer.adapter.close()


if __name__ == "__main__":
    main()
