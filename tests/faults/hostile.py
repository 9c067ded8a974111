"""Pieces of hostile reward functions, which ``rewards`` puts together.

``DEEDS`` are statements, with words in capitals that ``PARAMETERS`` have values for.
``VALUES`` are expressions of what a function may return, and whether that is a number.
"""

from __future__ import annotations

PARAMETERS: dict[str, tuple[str, ...]] = {
    "SIZE": ("10**3", "10**6", "3 * 10**7", "2 * 10**8"),
    "BYTES": ("b'x'", "b'\\x00\\xff'", 'b\'[1.0, "", 0.0, "", null]\\n\'', "b'\\n'", "b'{}\\n'"),
    "FD": ("0", "1", "2"),
    "SIGNAL": ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGALRM", "SIGXCPU", "SIGUSR2"),
    "CODE": ("0", "1", "7", "137", "255"),
    "COUNT": ("1", "5", "40"),
    "LONG": ("time.sleep(1000)", "threading.Event().wait()", "select.select([], [], [])"),
    "ERROR": (
        *("ValueError", "KeyError", "SystemExit", "KeyboardInterrupt", "MemoryError"),
        *("GeneratorExit", "RecursionError", "StopIteration", "BrokenPipeError", "TimeoutError"),
        *("EOFError", "UnicodeError", "StopAsyncIteration", "BaseException", "OSError"),
    ),
    "SAID": (
        *("'x' * 10**8", "1 / 0", "time.sleep(1000)", "3", "'\\ud800'", "'\\x1b[2J\\x00'"),
        *("Loud('x')", "str_of_itself()", "sys.exit(4)", "'\\n' * 10**6", "None"),
    ),
}

# Each is a statement, and what becomes of the call: a number, Invalid, or either.
DEEDS: tuple[tuple[str, str], ...] = (
    ("os.write(FD, BYTES * (SIZE))", "any"),
    ("print('x' * (SIZE), end='')", "any"),
    ("sys.stderr.write('x\\n' * ((SIZE) // 10))", "any"),
    ("sys.stdout.buffer.write(BYTES * (SIZE))", "any"),
    ("[os.write(fd, BYTES) for fd in writable()]", "any"),
    ("[os.write(fd, BYTES * (SIZE)) for fd in writable()]", "any"),
    ("[os.close(fd) for fd in open_ones()]", "any"),
    ("os.closerange(3, 5000)", "any"),
    ("[os.close(fd) for fd in (0, 1, 2)]", "any"),
    ("[os.dup2(os.open('/dev/null', os.O_RDWR), fd) for fd in writable()]", "any"),
    ("[os.set_blocking(fd, False) for fd in open_ones()]", "any"),
    ("[fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC) for fd in open_ones()]", "any"),
    ("kept.append(bytearray(8 << 30)); touch(kept[-1])", "invalid"),
    ("kept.extend(bytearray(1 << 20) for _ in range(10**6))", "invalid"),
    ("kept.append('x' * (5 * 10**9))", "invalid"),
    ("kept.append(list(range(10**9)))", "invalid"),
    ("allocate_in_children(COUNT)", "invalid"),
    ("while_true_fork()", "invalid"),
    ("while_true_fork(session=True)", "invalid"),
    ("[threading.Thread(target=time.sleep, args=(1000,)).start() for _ in range(500)]", "any"),
    ("[threading.Thread(target=time.sleep, args=(1000,)).start() for _ in range(COUNT)]", "any"),
    ("[daemon() for _ in range(COUNT)]", "any"),
    ("[child() for _ in range(COUNT)]", "any"),
    ("[child(start_new_session=True) for _ in range(COUNT)]", "any"),
    ("child(env={}); os.kill(os.getpid(), signal.SIGNAL)", "any"),
    ("[child(start_new_session=True, pass_fds=open_ones()) for _ in range(COUNT)]", "any"),
    ("child(pass_fds=open_ones()); os._exit(CODE)", "invalid"),
    ("os.fork() or time.sleep(0.05)", "any"),
    ("[os.fork() for _ in range(3)]", "any"),
    ("os.fork() or os._exit(CODE)", "any"),
    ("daemon(ignore=True)", "any"),
    ("daemon(); os.kill(os.getppid(), signal.SIGNAL)", "any"),
    ("os.kill(os.getppid(), signal.SIGNAL)", "any"),
    ("os.killpg(0, signal.SIGNAL)", "any"),
    ("os.kill(os.getpid(), signal.SIGNAL)", "any"),
    ("os.kill(os.getpid(), signal.SIGSTOP)", "any"),
    ("os.kill(os.getppid(), signal.SIGSTOP); time.sleep(1000)", "invalid"),
    ("os._exit(CODE)", "invalid"),
    ("sys.exit(CODE)", "invalid"),
    ("os.abort()", "invalid"),
    ("ctypes.string_at(0)", "invalid"),
    ("os.execv('/bin/sleep', ['sleep', '1000'])", "invalid"),
    ("os.execv('/bin/echo', ['echo', 'x' * 10**5])", "invalid"),
    ("LONG", "invalid"),
    ("ctypes.PyDLL(None).sleep(1000)", "invalid"),
    ("exec('while True: 1')", "invalid"),
    ("9 ** 9 ** 9", "invalid"),
    ("re.match('(a+)+$', 'a' * 40 + 'b')", "invalid"),
    ("deaf(); LONG", "invalid"),
    ("deaf(); daemon()", "any"),
    ("signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); LONG", "invalid"),
    ("signal.setitimer(signal.ITIMER_REAL, 0.01); LONG", "invalid"),
    ("raise ERROR('no')", "invalid"),
    ("raise ERROR(SAID)", "invalid"),
    ("raise Sly(lambda: SAID)", "invalid"),
    ("raise type('Own', (ERROR,), {'__str__': lambda self: SAID})('no')", "invalid"),
    ("raise BaseExceptionGroup('x', [Sly(lambda: SAID)] * COUNT)", "invalid"),
    ("noted(SAID)", "invalid"),
    ("chained(COUNT)", "invalid"),
    ("(f := lambda: f())()", "invalid"),
    ("os.chdir('/'); os.umask(0o777)", "number"),
    ("row.clear(); row.update(x=row)", "number"),
    ("json.dumps = json.loads = json.JSONEncoder = None", "number"),
    ("sys.stdout = sys.stderr = sys.stdin = None", "number"),
    ("time.perf_counter = time.monotonic = time.time = lambda: 'x'", "number"),
    ("os.write = os.getpid = os._exit = os.read = None", "number"),
    ("sys.modules.clear()", "any"),
    ("sys.setrecursionlimit(30)", "any"),
    ("sys.settrace(lambda *_: 1 / 0)", "any"),
    ("resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))", "any"),
    ("resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))", "any"),
    ("resource.setrlimit(resource.RLIMIT_CPU, (1, 1)); exec('while True: 1')", "invalid"),
    ("resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", "any"),
    ("kept.extend(os.pipe() for _ in range(10**7))", "invalid"),
    ("kept.extend(open('/dev/null') for _ in range(10**7))", "invalid"),
    ("kept.extend(socket.socketpair() for _ in range(10**7))", "invalid"),
    ("atexit.register(lambda: os.write(1, b'x' * 10**7)); sys.exit(CODE)", "invalid"),
    ("atexit.register(time.sleep, 1000)", "number"),
    ("gc.disable(); sys.setswitchinterval(100)", "number"),
    ("warnings.simplefilter('error')", "any"),
    ("os.environ.clear()", "number"),
    ("globals().clear()", "any"),
    ("sys.excepthook = sys.unraisablehook = None; kept.append(Rude()); kept.clear()", "any"),
)

VALUES: tuple[tuple[str, str], ...] = (
    *((v, "number") for v in ("True", "0", "-1.5", "10**30", "fractions.Fraction(1, 3)")),
    *((v, "number") for v in ("decimal.Decimal('0.5')", "np.float32(0.5)", "np.int8(3)")),
    *((v, "number") for v in ("np.array(0.5)", "np.bool_(True)", "Float('2.5')", "1e-400")),
    *((v, "number") for v in ("3.4e38", "-3.4e38", "type('I', (int,), {})(3)", "np.float16(1)")),
    *((v, "number") for v in ("Graded(0.5, 'x')", "Graded(1, 'x' * 10**7)", "Graded(1.0, None)")),
    *((v, "number") for v in ("Graded(0.5, Loud('x'))", "Graded(0.5, '\\ud800')", "Own(0.5)")),
    *((v, "any") for v in ("Graded(0.5, Sly(lambda: SAID))", "np.array([1.0])")),
    *((v, "invalid") for v in ("None", "'1.0'", "b'1'", "bytearray(b'1')", "''", "'banana'")),
    *((v, "invalid") for v in ("[1.0]", "(1.0,)", "{}", "{1.0}", "object()", "int", "len", "...")),
    *((v, "invalid") for v in ("1j", "complex(1, 0)", "np.complex64(1)", "np.complex128(1)")),
    *((v, "invalid") for v in ("float('nan')", "float('inf')", "-float('inf')", "np.nan", "1e39")),
    *((v, "invalid") for v in ("-1e39", "1e308", "10**39", "10**400", "-10**5000", "3.5e38")),
    *((v, "invalid") for v in ("decimal.Decimal('NaN')", "decimal.Decimal('1e500')")),
    *((v, "invalid") for v in ("decimal.Decimal('sNaN')", "np.float64('inf')", "np.float64(1e39)")),
    *((v, "invalid") for v in ("(x for x in [1])", "iter([1])", "coroutine()", "np.zeros(3)")),
    *((v, "invalid") for v in ("np.zeros((0,))", "np.array('x')", "np.array(None)")),
    *((v, "invalid") for v in ("Text('1.0')", "Own(SAID)", "Own('x')", "Own(1j)", "Own(10**400)")),
    *((v, "invalid") for v in ("Graded('1.0', 'x')", "Graded(None, 'x')", "Graded([], {})")),
    *((v, "invalid") for v in ("Graded(float('nan'), 'x')", "Graded(1e39, 'x')")),
    *((v, "invalid") for v in ("Graded(Graded(1.0, 'x'), 'x')", "Graded(Own(SAID), 'x')")),
    *((v, "invalid") for v in ("Invalid('no')", "Invalid(None)", "Invalid(3)", "Invalid(SAID)")),
    *((v, "invalid") for v in ("Invalid('x' * 10**8)", "Invalid(Sly(lambda: SAID))")),
    *((v, "invalid") for v in ("Invalid(Invalid('x'))", "Liar()", "Mean()", "Meta('M', (), {})()")),
)

# How a deed is done. DEED is replaced.
WAYS: dict[str, str] = {
    "at once": "DEED",
    "in a thread": "in_thread(lambda: exec(code))",
    "in a thread, later": "in_thread(lambda: (time.sleep(0.02), exec(code)))",
    "in a child": "os.fork() or (exec(code), os._exit(0))",
    "in an orphan": "os.fork() or (os.setsid(), os.fork(), exec(code), os._exit(0))",
    "in a conversion": "return Own(Late(code))",
    "in a message": "raise Sly(lambda: exec(code))",
}

HEADER = """
import atexit, ctypes, decimal, fcntl, fractions, gc, json, os, random, re, resource, select
import signal, socket, subprocess, sys, threading, time, warnings
import numpy as np
from coupler.rewards import Graded, Invalid

kept = []

class Float(float):
    def __float__(self): return self
    def __repr__(self): return "junk"

class Loud(str):
    def __str__(self): return self
    def __repr__(self): return "x" * 10**8
    def __getitem__(self, key): raise ValueError("no")

class Text(str):
    def __float__(self): return 1.0

class Late:
    def __init__(self, code): self.code = code

class Own:
    def __init__(self, value): self.value = value
    def __float__(self):
        if isinstance(self.value, Late):
            exec(self.value.code, globals())
            return 0.5
        return self.value

class Sly(Exception):
    def __init__(self, said): self.said = said
    def __str__(self): return self.said()
    __repr__ = __str__

class Liar:
    __class__ = Graded

class Mean:
    def __getattr__(self, name): raise KeyboardInterrupt(name)

class Meta(type):
    @property
    def __name__(self): raise ValueError("no name")

class Rude:
    def __del__(self): raise SystemExit(3)

async def coroutine(): return 1.0

def str_of_itself(): return str_of_itself()

def open_ones():
    return [int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]

def writable():
    found = []
    for fd in open_ones():
        try:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & 3: found.append(fd)
        except OSError: continue
    return found

def touch(block):
    for i in range(0, len(block), 4096): block[i] = 1

def child(**options):
    return subprocess.Popen(["sleep", SLEEP], **options)

def daemon(ignore=False):
    if os.fork(): return
    os.setsid()
    if os.fork(): os._exit(0)
    if ignore: deaf()
    os.execv("/bin/sleep", ["sleep", SLEEP])

def allocate_in_children(count):
    for _ in range(count + 1):
        if not os.fork():
            block = bytearray(1 << 30); touch(block); time.sleep(1000)
    time.sleep(1000)

def while_true_fork(session=False):
    while True:
        if not os.fork() and session: os.setsid()

def deaf():
    for number in signal.valid_signals():
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): continue

def in_thread(function):
    threading.Thread(target=function, daemon=True).start()

def noted(what):
    error = ValueError("no"); error.add_note("x"); error.__notes__ = what
    raise error

def chained(count):
    error = None
    for i in range(count * 1000):
        new = ValueError("x" * 1000); new.__cause__ = error; error = new
    raise error
"""
