"""Hostile programs in the sandbox: each tries one thing, and the machine stays as it was."""

import os
from pathlib import Path
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid

import pytest

from grpo_jax.rewards.sandbox import runner
from grpo_jax.settings import ConfigError

KINDS = [pytest.param("bwrap"), pytest.param("unshare", marks=pytest.mark.slow)]


@pytest.fixture(params=KINDS)
def kind(request):
  reason = runner._problem(request.param)
  if reason:
    pytest.skip(f"{request.param} does not work here: {reason}")
  return request.param


def programs_with(marker):
  """The ids of the processes of this machine whose command line holds the marker."""
  found = []
  for folder in Path("/proc").iterdir():
    try:
      if folder.name.isdigit() and marker in (folder / "cmdline").read_text(errors="replace"):
        found.append(int(folder.name))
    except OSError:  # it has ended
      pass
  return found


def run(kind, program, wait=10.0, stdout=subprocess.PIPE, **limits):
  """What a program prints in `wait` seconds. Asserts that nothing of it is left then."""
  marker = uuid.uuid4().hex
  program = f"# {marker}\nimport os, sys\n{textwrap.dedent(program)}"
  streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": subprocess.STDOUT}
  process = runner.start(
    program, runner.SandboxLimits(**({"seconds": 5} | limits)), kind, **streams
  )
  try:
    printed = process.communicate(timeout=wait)[0] or b""
  except subprocess.TimeoutExpired as error:
    printed = error.stdout or b""
  finally:
    runner.stop(process)
  deadline = time.monotonic() + 5
  while programs_with(marker) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not programs_with(marker)
  return printed.decode(errors="replace")


def test_a_program_runs_with_the_same_python(kind):
  assert run(kind, "import ctypes, ssl; print(sys.version)") == f"{sys.version}\n"
  assert run(kind, "import json, math; print(json.dumps([math.pi > 3]))") == "[true]\n"


def test_it_sees_no_files_of_the_user_and_no_environment(kind, tmp_path, monkeypatch):
  secret = tmp_path / "secret"
  secret.write_text("gold answers")
  monkeypatch.setenv("API_KEY", "hidden")
  paths = [str(secret), os.path.expanduser("~/.bashrc"), "/etc/passwd", "/etc/shadow", __file__]
  paths += ["/proc/self/environ", "/proc/1/environ", "/dev/mem", "/sys/kernel", "/var/log"]
  printed = run(
    kind,
    f"""
    for path in {paths!r}:
      try:
        print("READ", path, os.listdir(path) if os.path.isdir(path) else open(path).read())
      except OSError as error:
        print("refused")
    print(os.listdir("/tmp"), "API_KEY" in os.environ, os.getcwd())
    """,
  )
  assert printed == "refused\n" * len(paths) + "[] False /tmp\n"


def test_it_writes_nowhere_but_in_its_own_folder(kind, tmp_path):
  prefix, mine = sys.base_prefix, uuid.uuid4().hex
  printed = run(
    kind,
    f"""
    for folder in ("/", "/usr", "/usr/lib", "/lib", "/programs", "/root", "/home", {prefix!r},
                   "/packages", "/packages/numpy", {str(tmp_path)!r}, "/etc", "/dev", "/var/tmp"):
      try:
        open(os.path.join(folder, {mine!r}), "w")
        print("WROTE", folder)
      except OSError:
        pass
    open("/tmp/{mine}", "w").write("x")
    print(os.listdir("/tmp"))
    """,
  )
  assert printed == f"['{mine}']\n"
  assert not os.path.exists(f"/tmp/{mine}")


def test_what_it_sees_is_read_only_even_where_everybody_may_write(kind, monkeypatch):
  with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
    os.chmod(folder, 0o777)
    monkeypatch.setattr(runner, "_READ_ONLY", (*runner._READ_ONLY, folder))
    printed = run(
      kind,
      f"""
      print(os.listdir({folder!r}))
      try:
        open({folder!r} + "/x", "w")
      except OSError as error:
        print(error.errno)
      """,
    )
    assert printed == "[]\n30\n"
    assert not os.listdir(folder)


def test_it_reaches_no_network(kind):
  with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
    name = f"\0{uuid.uuid4().hex}"
    local.bind(name)
    local.listen()
    port = server.getsockname()[1]
    socket.create_connection(("127.0.0.1", port)).close()  # the server can be reached from here
    printed = run(
      kind,
      f"""
      import socket
      for kind, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, {name!r}),
                            (socket.AF_INET, ("192.0.2.1", 80)), (socket.AF_INET, ("8.8.8.8", 53))):
        try:
          socket.socket(kind).connect(address)
          print("CONNECTED", address)
        except OSError:
          pass
      print([name for _, name in socket.if_nameindex()])
      """,
    )
  assert printed == "['lo']\n"


def test_it_gains_no_privileges(kind):
  printed = run(
    kind,
    """
    import ctypes
    libc = ctypes.CDLL(None)
    print([libc.unshare(0x10000000), libc.mount(b"a", b"/tmp", b"tmpfs", 0, None),
           libc.chroot(b"/tmp"), libc.ptrace(16, 1, 0, 0), libc.setns(0, 0)])
    print(os.path.exists("/proc/1"), os.getpid() < 100)
    """,
  )
  assert printed == "[-1, -1, -1, -1, -1]\nFalse True\n"


BOMB = """
while True:
  try:
    os.fork()
  except OSError:
    pass
"""


def test_a_fork_bomb_stays_small_and_is_killed(kind):
  counted, name = [], uuid.uuid4().hex
  counter = threading.Timer(0.7, lambda: counted.append(len(programs_with(name))))
  counter.start()
  printed = run(kind, f"print('started', flush=True)  # {name}{BOMB}", wait=1, processes=8)
  counter.join()
  assert "started" in printed
  assert 8 <= counted[0] <= 8 + 4  # the sandbox has processes of its own


def test_a_program_cannot_start_others_by_default(kind):
  printed = run(
    kind,
    """
    import threading
    for start in (os.fork, threading.Thread(target=print).start):
      try:
        start()
        print("STARTED")
      except (OSError, RuntimeError) as error:
        print(type(error).__name__)
    """,
  )
  assert printed == "BlockingIOError\nRuntimeError\n"


def test_threads_are_no_processes(kind):
  printed = run(
    kind,
    """
    import ctypes, subprocess, threading, time
    started = 0
    try:
      for started in range(99):
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
    except RuntimeError:
      print("threads", started)
    libc = ctypes.CDLL(None)
    calls = {"x86_64": [(57,), (58,), (56, 17), (56, 0x4111), (435, 0, 0), (56, 0x10010000)],
             "aarch64": [(220, 17), (220, 0x4111), (435, 0, 0), (220, 0x10010000)]}
    print({libc.syscall(*call, 0, 0, 0, 0) for call in calls[os.uname().machine]})
    for start in (os.fork, lambda: subprocess.run("/bin/true"),
                  lambda: os.posix_spawn("/bin/true", ["x"], {})):
      try:
        start()
        print("STARTED")
      except OSError as error:
        print(type(error).__name__)
    """,
    threads=8,
  )
  assert printed == "threads 7\n{-1}\n" + "BlockingIOError\n" * 3


def test_numpy_is_there_and_no_other_package(kind):
  printed = run(
    kind,
    """
    import importlib.util
    import numpy
    print(numpy.linalg.inv(numpy.eye(200)).sum(), sorted(os.listdir("/packages"))[0])
    print([name for name in ("jax", "flax", "pytest", "pip") if importlib.util.find_spec(name)])
    """,
    memory=2**28,
  )
  assert printed == "200.0 numpy\n[]\n"


def test_a_daemon_is_killed_too(kind):
  printed = run(
    kind,
    """
    import ctypes, signal, time
    if os.fork() == 0:
      os.setsid()
      if os.fork() == 0:
        for number in range(1, 65):
          try:
            signal.signal(number, signal.SIG_IGN)
          except (OSError, ValueError):
            pass
        ctypes.CDLL(None).prctl(1, 0)  # no signal when its parent dies
        print("daemon", os.getpid(), flush=True)
        time.sleep(1000)
      os._exit(0)
    time.sleep(0.3)
    """,
    processes=8,
    wait=3,
  )
  assert printed.startswith("daemon")


@pytest.mark.slow
@pytest.mark.parametrize(
  "program",
  [
    "while True: pass",
    "import signal; signal.signal(signal.SIGXCPU, lambda *a: 0)\nwhile True: pass",
  ],
)
def test_a_loop_ends_with_its_cpu_time(kind, program):
  start = time.monotonic()
  run(kind, program, wait=30, seconds=1)
  assert time.monotonic() - start < 25


def test_a_sleeper_is_killed(kind):
  start = time.monotonic()
  run(kind, "import time; time.sleep(1000)", wait=0.5)
  assert time.monotonic() - start < 5


def test_memory_is_limited(kind):
  printed = run(
    kind,
    """
    try:
      print(len(bytearray(2**29)))
    except MemoryError:
      print("no memory")
    print(len(bytearray(2**26)))
    try:
      os.memfd_create("memory in no address space")
    except PermissionError:
      print("refused")
    """,
    memory=2**28,
  )
  assert printed == f"no memory\n{2**26}\nrefused\n"


@pytest.mark.slow
def test_gigabytes_of_output_go_nowhere(kind):
  start = time.monotonic()
  program = "chunk = b'x' * 2**20\nfor _ in range(2**10): os.write(1, chunk)"
  assert run(kind, program, stdout=subprocess.DEVNULL) == ""
  assert run(kind, program, wait=1, stdout=(pipe := os.pipe())[1]) == ""  # nobody reads it
  for end in pipe:
    os.close(end)
  assert time.monotonic() - start < 10


def test_files_are_limited(kind):
  printed = run(
    kind,
    """
    import errno, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    written, errors = 0, set()
    for number in range(100):
      try:
        with open(f"/tmp/{number}", "wb", buffering=0) as file:
          for _ in range(5):
            written += file.write(bytes(2**20))
      except OSError as error:
        errors.add(errno.errorcode[error.errno])
    print(written // 2**20, sorted(errors))
    """,
    memory=2**28,
    file_size=2**22,
  )
  # Of each file 4 MiB, and of all 256 MiB.
  assert printed in ("256 ['EFBIG', 'ENOSPC']\n", "255 ['EFBIG', 'ENOSPC']\n")


def test_it_ends_with_the_program_that_started_it(kind, tmp_path):
  marker = uuid.uuid4().hex
  code = f"""
import subprocess, time
from grpo_jax.rewards.sandbox import runner
runner.start("# {marker}\\nimport time; print('up', flush=True); time.sleep(1000)",
              runner.SandboxLimits(), "{kind}", stdin=subprocess.DEVNULL)
time.sleep(1000)
"""
  parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
  assert parent.stdout.readline() == b"up\n"
  assert len(programs_with(marker)) > 1
  parent.send_signal(signal.SIGKILL)
  parent.wait()
  parent.stdout.close()
  deadline = time.monotonic() + 10
  while programs_with(marker) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not programs_with(marker)


def test_many_run_at_once(kind):
  found = []
  threads = [
    threading.Thread(target=lambda i=i: found.append(run(kind, f"print({i}, end='')")))
    for i in range(8)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(found) == [str(i) for i in range(8)]


def test_without_a_sandbox_it_says_what_to_install(monkeypatch):
  monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
  runner.find.cache_clear()
  try:
    with pytest.raises(
      ConfigError, match="bwrap: there is no bwrap; unshare: .*install bubblewrap"
    ):
      runner.find()
  finally:
    runner.find.cache_clear()


def test_a_sandbox_that_shows_files_is_not_used(monkeypatch, tmp_path):
  if runner._problem("bwrap"):
    pytest.skip("bwrap does not work here")

  def leaky(command, limits):
    wrapped = runner._bwrap(command, limits)
    place = wrapped.index("--size") - 2
    return [*wrapped[:place], "--ro-bind", "/tmp", "/tmp", *wrapped[place + 6 :]]

  monkeypatch.setitem(runner._WRAP, "bwrap", leaky)
  assert "it fails" in runner._problem("bwrap")
