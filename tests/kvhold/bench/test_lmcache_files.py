"""The script for the other environment, run against a stand-in of what it imports."""

import subprocess
import sys
from pathlib import Path

from kvhold.bench.store_lmcache import SCRIPT

API = "from collections import namedtuple\nObjectKey = namedtuple('ObjectKey', 'chunk_hash model_name kv_rank')\n"
ADAPTER = """
import os

class FSL2AdapterConfig:
    def __init__(self, folder, use_odirect):
        assert use_odirect

class Found:
    def popcount(self):
        return 3

class FSL2Adapter:
    def __init__(self, config):
        self.fd = os.eventfd(1)
    def submit_store_task(self, keys, objects):
        assert len(keys) == len(set(keys)) == len(objects) == 3
        assert all(item.get_size() == 4096 for item in objects)
    def pop_completed_store_tasks(self):
        return {1: True}
    def submit_load_task(self, keys, objects):
        return 1
    def query_load_result(self, task):
        return Found()
    def get_store_event_fd(self):
        return self.fd
    get_load_event_fd = get_store_event_fd
    def delete(self, keys):
        pass
    def close(self):
        pass
"""


def test_it_answers_every_line(tmp_path: Path) -> None:
    package = tmp_path / "lmcache" / "v1" / "distributed"
    (package / "l2_adapters").mkdir(parents=True)
    (package / "api.py").write_text(API)
    (package / "l2_adapters" / "fs_l2_adapter.py").write_text(ADAPTER)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "3", "4096", "direct"],
        input="store 1\nload 1\n",
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    ready, *answers = done.stdout.split("\n")[:-1]
    assert ready == "ready"
    assert [line.split()[0] for line in answers] == ["seconds", "seconds"]
