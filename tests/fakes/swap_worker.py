"""A worker of the swap benchmark without a tensor library: ``python swap_worker.py [behaviour ...]``.

Behaviours: ``wrong`` (a check finds a difference), ``leak`` (one handle more per cycle), ``die-on-wake``,
``accept-corrupt-wake``, ``leak-on-refusal``, ``silent`` (no answer).
"""

import json
import sys
import time

CHUNK = 1 << 20


class FakeMember:
    def __init__(self, behaviours):
        self.behaviours = behaviours
        self.asleep = False
        self.damaged = False
        self.handles = 4
        self.missing = 0

    def init(self, nbytes, kv_bytes, **_):
        self.nbytes = nbytes + kv_bytes
        self.weights = nbytes
        return {"weight_bytes": nbytes, "tensors": 1}

    def sleep(self, nbytes=None):
        assert not self.asleep
        self.asleep = True
        self.missing = self.nbytes if nbytes is None else min(self.nbytes, -(-nbytes // CHUNK) * CHUNK)
        self.handles += "leak" in self.behaviours
        return {"missing_bytes": self.missing}

    def wake(self):
        if "die-on-wake" in self.behaviours:
            sys.exit("killed by the test")
        if self.damaged and "accept-corrupt-wake" not in self.behaviours:
            self.handles += "leak-on-refusal" in self.behaviours
            return {"ok": False, "code": "checksum_mismatch", "error": "a bit differs"}
        self.asleep = False
        return {"report": {"bytes_copied": self.missing, "map_ms": 1.0, "copy_ms": 2.0, "verify_ms": 0.5}}

    def use(self):
        assert not self.asleep
        return {"value": 1}

    def check(self):
        assert not self.asleep
        return {"wrong": int("wrong" in self.behaviours), "graphs_identical": None}

    def corrupt(self):
        self.damaged = not self.damaged
        return {}

    def stats(self, resident=True):
        return {
            "rss_bytes": 1 << 20 if resident else None,
            "device_bytes": 100 if self.asleep else 100 + self.nbytes,
            "host_bytes": self.weights,
            "handles": {"handles": self.handles},
            "free_bytes": None,
        }


def main():
    member = FakeMember(sys.argv[1:])
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        time.sleep(max(0.0, request.pop("at", 0.0) - time.monotonic()))
        if request.pop("report_progress", False):
            print(json.dumps({"progress": [1, 2]}), flush=True)
        if "silent" in member.behaviours:
            continue
        print(json.dumps({"ok": True, "ms": 2.0, **getattr(member, op)(**request)}), flush=True)


if __name__ == "__main__":
    main()
