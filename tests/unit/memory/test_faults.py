"""What must end a process: touching memory that is asleep. One interpreter, one forked child per case."""

import json
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import ctypes, json, os, pathlib, signal, sys, time
from hotrack.core.tensorspec import TensorSpec
from hotrack.core.errors import SleepError
from hotrack.memory import MemoryManager
from hotrack.memory.backend import BackendError

store = pathlib.Path(sys.argv[1])
memory = MemoryManager(store_dir=store)
specs = [TensorSpec("a", (1 << 20,), "uint8"), TensorSpec("b", (1 << 20,), "uint8")]
weights = memory.allocate_weights(specs)
kv = memory.allocate_bytes("kv_cache", 1 << 20)
memory.seal()

def touch(tensor):
    return ctypes.c_ubyte.from_address(tensor.data_ptr() + 5000).value

def in_child(case):
    pid = os.fork()
    if pid == 0:
        own = MemoryManager(store_dir=store)
        t = own.allocate_weights(specs)
        own_kv = own.allocate_bytes("kv_cache", 1 << 20)
        own.seal()
        case(own, t, own_kv)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def asleep(own, t, own_kv):
    touch(t["a"]); own.sleep(1); touch(t["a"])
def kv_asleep(own, t, own_kv):
    own.sleep(1); own.wake(["weights"]); touch(t["a"]); touch(own_kv)
def dropped(own, t, own_kv):
    own.drop_pages(["a"]); touch(t["b"]); touch(t["a"])
def dropped_and_rolled_back(own, t, own_kv):
    own.drop_pages(["a"])
    real, calls = own._backend.unmap, []
    def unmap(address, nbytes):
        calls.append(address)
        if len(calls) == 2:
            raise BackendError("injected")
        real(address, nbytes)
    own._backend.unmap = unmap
    try:
        own.sleep(1)
    except SleepError:
        touch(t["b"]); touch(own_kv); touch(t["a"])
def woken(own, t, own_kv):
    own.drop_pages(["a"]); own.sleep(1); own.wake(); touch(t["a"]); touch(t["b"]); touch(own_kv)
def closed(own, t, own_kv):
    own.close(); touch(t["a"])
def inherited(own, t, own_kv):
    touch(weights["a"])
def killed(own, t, own_kv):
    own.sleep(1); os.kill(os.getpid(), signal.SIGKILL)

touch(weights["a"]); touch(kv)
cases = [asleep, kv_asleep, dropped, dropped_and_rolled_back, woken, closed, inherited, killed]
print(json.dumps({case.__name__: in_child(case) for case in cases} | {"files": os.listdir(store)}))
"""


def test_touching_sleeping_memory_ends_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    fault = -signal.SIGSEGV
    assert json.loads(done.stdout) == {
        "asleep": fault,
        "kv_asleep": fault,
        "dropped": fault,
        "dropped_and_rolled_back": fault,
        "woken": 0,
        "closed": fault,
        "inherited": fault,
        "killed": -signal.SIGKILL,
        "files": [],
    }
