"""Programs that harm, or try to: for the tests of the sandbox.

Each has a name, its code, and the end that it comes to: ``lost`` where its interpreter
is gone, ``slow`` where its time is over, else a text that its answer holds. None is
bounded by anything but the sandbox, except where a loop would tell nothing more.
"""

from __future__ import annotations

SECRET = "a-secret-of-the-run"

PROGRAMS: dict[str, tuple[str, str]] = {
    # ends of its own process
    "exit": ("import os\nos._exit(0)", "lost"),
    "sys exit": ("import sys\nsys.exit('bye')", "SystemExit: bye"),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "kill itself": ("import os\nos.kill(os.getpid(), 9)", "lost"),
    "abort": ("import os\nos.abort()", "lost"),
    "segfault": ("import ctypes\nctypes.string_at(0)", "lost"),
    "recursion": ("def f(): return f()\nf()", "RecursionError"),
    "deep parse": ("(" * 100_000, "Error"),
    "deep data": ("x = []\nfor _ in range(10**6): x = [x]\nrepr(x)", "RecursionError"),
    "no exit code": ("raise SystemExit(10**30)", "SystemExit"),
    # the descriptors of the protocol
    "close all": ("import os\nos.closerange(0, 1000)", "lost"),
    "close output": ("import os\nos.close(1); os.close(2)\n41 + 1", "42"),
    "write garbage": ("import os\nos.write(3, b'\\xff' * 100_000)", "lost"),
    "write everywhere": (
        "import os\nfor n in range(3, 300):\n  try: os.write(n, b'{}\\n' * 99)\n"
        "  except OSError: 0",
        "lost",
    ),
    "forge a frame": (
        'import os, struct\nbody = b\'{"number": 7, "value": 1, "error": []}\'\n'
        "os.write(3, struct.pack('>I', len(body)) + body)",
        "lost",
    ),
    "huge frame": ("import os\nos.write(3, b'\\xff\\xff\\xff\\xff')\nwhile True: pass", "lost"),
    "deep frame": (
        "import os, struct\nos.write(3, struct.pack('>I', 90_000) + b'[' * 90_000)",
        "lost",
    ),
    "half a frame": ("import os\nos.write(3, b'\\0\\0\\0\\7x')\nwhile True: pass", "slow"),
    "read requests": ("import os\nos.read(3, 1)", "slow"),
    "surrogates": ("'\\ud800' + chr(0xdfff)", "\\ud800"),
    "bytes": ("import os\nos.write(1, bytes(range(256))); 1", "1"),
    # time and memory
    "loop": ("while True: pass", "slow"),
    "loop in C": ("sum(range(10**12))", "slow"),
    "loop that catches": ("while True:\n  try:\n    while True: pass\n  except: pass", "slow"),
    "ignored signals": (
        "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): 0\nwhile True: pass",
        "slow",
    ),
    "memory": ("x = bytearray(10**10)", "MemoryError"),
    "memory of children": (
        "import os, time\nfor _ in range(6):\n  if not os.fork():\n    x = b'1' * (200 << 20)\n"
        "    time.sleep(9)\ntime.sleep(9)",
        "lost",
    ),
    "shared memory": ("import mmap\nm = mmap.mmap(-1, 10**10)", "Error"),
    "memory file": ("import os\nos.memfd_create('x')", "PermissionError"),
    "power": ("10 ** 10 ** 10", "slow"),
    "huge output": ("while True: print('x' * 100_000)", "slow"),
    "huge value": ("'x' * 10**8", "characters) ..."),
    "huge error": ("raise ValueError('x' * 10**8)", "characters) ..."),
    "slow value": (
        "class A:\n  def __repr__(self):\n    while True: pass\nA()",
        "slow",
    ),
    "error without text": (
        "class A(Exception):\n  def __str__(self): raise SystemExit\nraise A",
        "A: <exception str() failed>",
    ),
    # files
    "delete files": (
        "import shutil\nshutil.rmtree('/', ignore_errors=True)\n"
        "import os; sorted(os.listdir('/usr'))[:1]",
        "bin",
    ),
    "write files": ("open('/usr/x', 'w')", "Error"),
    "fill the disk": ("with open('x', 'wb') as f:\n  while True: f.write(bytes(1 << 20))", "Error"),
    "many files": ("for n in range(10**6): open(f'f{n}', 'w').close()", "No space left"),
    "fill shared files": (
        "for n in range(10**6):\n  open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20))",
        "No space left",
    ),
    "remount": (
        "import ctypes\nctypes.CDLL(None).mount(b'x', b'/usr', b'tmpfs', 0, None)",
        "-1",
    ),
    "read what is there": (
        "import os\nfor d, _, fs in os.walk('/'):\n  for f in fs:\n    p = os.path.join(d, f)\n"
        "    if d.startswith(('/proc', '/tmp', '/root', '/home', '/etc', '/run')) and '.py' not in"
        " d:\n      try: print(open(p, errors='replace').read(9999))\n      except OSError: 0",
        "",
    ),
    # what is not its own
    "environment": ("import os\nprint(dict(os.environ))", "HOME"),
    "environment of others": (
        "import glob\nfor p in glob.glob('/proc/*/environ'): print(open(p).read())\n'read'",
        "read",
    ),
    "signals to all": (
        "import os\nfor p in (1, -1):\n  try: os.kill(p, 9)\n  except OSError: 0\n'alive'",
        "alive",
    ),
    "signals to numbers": (
        "import os\nfor p in range(2, 5000):\n  try: p != os.getpid() and os.kill(p, 9)\n"
        "  except OSError: 0\n'alive'",
        "alive",
    ),
    "kill its parent": ("import os\nos.kill(os.getppid(), 9); os.getppid()", "1"),
    "trace": ("import ctypes\nctypes.CDLL(None).ptrace(16, 1, 0, 0)", "-1"),
    "namespaces": ("import ctypes\nctypes.CDLL(None).unshare(0x10000000)", "-1"),
    "become root": ("import os\nos.setuid(0)", "Error"),
    "network": ("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)", "unreachable"),
    "loopback": ("import socket\nsocket.create_connection(('127.0.0.1', 22), 1)", "unreachable"),
    "virtual machine socket": ("import socket\nsocket.socket(40, 1)", "not supported"),
    "netlink": ("import socket\nsocket.socket(16, 3)", "not supported"),
    # processes
    "forks": (
        "import os, time\nn = 0\ntry:\n  for n in range(200):\n    if not os.fork():\n"
        "      time.sleep(9); os._exit(0)\nexcept OSError: print('refused at', n)",
        "refused at",
    ),
    "endless forks": (
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "slow",
    ),
    "threads": (
        "import threading, time\ntry:\n  for n in range(200):\n    threading.Thread(target="
        "time.sleep, args=(9,), daemon=True).start()\nexcept RuntimeError: print('refused')",
        "refused",
    ),
    "fork and come back": ("import os\nos.fork()\n'one'", "one"),
    "session of its own": (
        "import os, time\nif not os.fork():\n  os.setsid()\n  if not os.fork():\n"
        "    time.sleep(99)\n  os._exit(0)\n'left'",
        "left",
    ),
    "threads left behind": (
        "import threading\ndef f():\n  while True: pass\n"
        "for _ in range(3): threading.Thread(target=f).start()\n'left'",
        "left",
    ),
    "at exit": ("import atexit, os\natexit.register(os.abort)\n'set'", "set"),
    # what the interpreter itself uses
    "builtins": (
        "import builtins\nfor n in ('exec', 'eval', 'repr', 'isinstance', 'len', 'compile', 'str'):"
        "\n  setattr(builtins, n, lambda *a, **k: 1 / 0)\n1",
        "",
    ),
    "modules": ("import sys\nsys.modules.clear()\n1", ""),
    "json": ("import json\njson.JSONEncoder.encode = lambda *a: 1 / 0\n1", ""),
    "output replaced": ("import sys\nsys.stdout = sys.stderr = None\n7 * 6", "42"),
    "output that fails": (
        "import sys\nclass A:\n  def __getattr__(self, n): raise SystemExit\nsys.stdout = A()\n42",
        "42",
    ),
    "frames": (
        "import sys\nf = sys._getframe()\nwhile f:\n  f.f_locals.clear(); f = f.f_back\n'done'",
        "",
    ),
    "trace function": ("import sys\nsys.settrace(lambda *a: 1 / 0)\n1", ""),
    "collector": (
        "import gc\nfor o in gc.get_objects():\n  if type(o) is dict: o.clear()\n1",
        "",
    ),
}
