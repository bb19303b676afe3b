# ruff: noqa: E501 - programs are easier to read on their own lines
"""Programs that mean harm. Each says REACHED when it got what it should not have.

`{tcp}`, `{udp}` and `{abstract}` listen on the machine; `{secret}` is a file of it that says
CANARY, beside the socket `{socket}`; the node's environment has ASTRAFLOW_TEST_SECRET.
"""

CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(number, *arguments)
"""

PROGRAMS = {
    "tcp to the machine": """
import socket
for host in ("127.0.0.1", "localhost", "0.0.0.0", "::1", "10.0.0.1", "169.254.169.254"):
    try:
        socket.create_connection((host, {tcp}), timeout=0.3).send(b"x"); print("REACHED", host)
    except OSError as error: print(error)
""",
    "tcp to the world": """
import socket
for host in ("1.1.1.1", "2606:4700:4700::1111"):
    try: socket.create_connection((host, 443), timeout=0.3); print("REACHED", host)
    except OSError as error: print(error)
""",
    "udp": """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for place in (("127.0.0.1", {udp}), ("8.8.8.8", 53), ("255.255.255.255", {udp})):
    try: s.sendto(b"x", place); print("sent")
    except OSError as error: print(error)
""",
    "dns": """
import socket
for name in ("pypi.org", "example.com"):
    try: print("REACHED", socket.getaddrinfo(name, 443))
    except OSError as error: print(error)
""",
    "sockets of the machine": """
import socket
for place in ("{socket}", "\\0{abstract}", "/run/docker.sock", "/var/run/docker.sock", "/run/dbus/socket"):
    try: socket.socket(socket.AF_UNIX).connect(place); print("REACHED", place)
    except OSError as error: print(error)
""",
    "other sockets": """
import socket
for family in (16, 17, 38, 40, 44):
    try: socket.socket(family, socket.SOCK_RAW if family < 30 else socket.SOCK_STREAM); print("REACHED", family)
    except OSError as error: print(error)
try: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print("REACHED raw")
except OSError as error: print(error)
""",
    "files of the machine": """
import glob, os
for place in ("/etc/shadow", "/root/.bashrc", "{secret}", "/srv", "/home", "/var/log", "/sys/kernel", "/boot"):
    try: print("REACHED", place, os.listdir(place) if os.path.isdir(place) else open(place).read(10))
    except OSError as error: print(error)
for folder, _, files in os.walk("/"):
    for name in files:
        if name.endswith("canary.txt"): print("REACHED", folder, name)
    if folder in ("/proc", "/usr"): _.clear()
""",
    "writing outside": """
import os
for place in ("/x", "/usr/x", "/usr/bin/python3", "/etc/passwd", "/etc/x", "/opt/x", "/opt/guest.pyc", "/dev/x",
              "/opt/bin/python3", "/proc/x", "/lib/x", "{secret}"):
    try: open(place, "a").write("x"); print("REACHED", place)
    except OSError as error: print(error)
""",
    "symlinks": """
import os
os.symlink("/etc/shadow", "/tmp/a"); os.symlink("{secret}", "/tmp/b"); os.symlink("/", "/tmp/root")
os.symlink("../../../../../../../../root", "/tmp/c")
for place in ("/tmp/a", "/tmp/b", "/tmp/root/etc/shadow", "/tmp/c/.bashrc"):
    try: print("REACHED", open(place).read(10))
    except OSError as error: print(error)
""",
    "proc of others": """
import os
for pid in {1, 2, 3, 4, os.getppid()} - {os.getpid()}:
    for name in ("root/etc/shadow", "root{secret}", "cwd", "fd/0", "fd/1", "fd/3", "mem", "environ", "maps", "ns/user"):
        try:
            place = f"/proc/{pid}/{name}"
            found = open(place, "rb").read(100) if "/cwd" not in name else os.readlink(place)
            if found and name not in ("environ", "maps"): print("REACHED", place, found)
        except OSError as error: pass
print(sorted(os.listdir("/proc"))[:5])
""",
    "settings of the kernel": """
for place in ("kernel/core_pattern", "kernel/modprobe", "vm/overcommit_memory", "kernel/hostname", "user/max_user_namespaces"):
    try: open("/proc/sys/" + place, "w").write("1"); print("REACHED", place)
    except OSError as error: print(error)
for place in ("/proc/sysrq-trigger", "/sys/fs/cgroup/cgroup.procs", "/proc/self/oom_score_adj/../../sysrq-trigger"):
    try: open(place, "w").write("b"); print("REACHED", place)
    except OSError as error: print(error)
""",
    "fork bomb": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "fork bomb of sessions": """
import os
while True:
    try: os.fork() or os.setsid()
    except OSError: pass
""",
    "threads": """
import threading, time
for number in range(10_000):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("REACHED")
""",
    "memory": "x = bytearray(64 * 2**30); print('REACHED')",
    "memory of many": """
import os, time
for _ in range(12):
    if os.fork() == 0:
        x = bytearray(b"1" * (100 * 2**20)); time.sleep(60)
time.sleep(60); print("REACHED")
""",
    "memory of nobody": CALL
    + """
for number in (319, 447, 29):
    got = call(number, b"x" if number != 29 else 0, 0 if number != 29 else 2**20, 0o1600)
    print("REACHED" if got >= 0 else ctypes.get_errno(), number)
""",
    "disk": """
import os
for folder in ("/tmp", "/dev/shm", "/dev", "/run", "/"):
    total = 0
    try:
        for number in range(100_000):
            with open(f"{folder}/f{number}", "wb") as file: total += file.write(bytes(2**20))
    except OSError as error: print(folder, error)
    if total > 80 * 2**20: print("REACHED", folder, total)
""",
    "one large file": "open('/tmp/f', 'wb').write(bytes(40 * 2**20)); print('REACHED')",
    "endless output": "while True: print('x' * 1000)",
    "endless errors": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "deaf to signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(256):
            try: os.close(number)
            except OSError: pass
        time.sleep(600)
    os._exit(0)
print("gone")
""",
    "daemon that holds the output": """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
print("gone", flush=True)
os._exit(0)
""",
    "ptrace": CALL
    + """
for pid in {1, 2, os.getppid()} - {os.getpid()}:
    for number in (101, 310, 438):
        got = call(number, 16, pid, 0, 0) if number != 438 else call(number, os.pidfd_open(pid), 1, 0)
        print("REACHED" if got >= 0 else ctypes.get_errno(), number)
""",
    "kill -9 -1": "import os\nos.kill(-1, 9)\nprint('here')",
    "kill the parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(1, 15)\nos.kill(1, 2)\nos.kill(1, 11)\nwhile True: pass",
    "stop the parent": "import os\nos.kill(os.getppid(), 19)\nwhile True: pass",
    "signals to all": """
import os
for pid in {*range(1, 400)} - {os.getpid()}:
    for number in (1, 2, 3, 10, 12, 13, 15, 18):
        try: os.kill(pid, number)
        except OSError: pass
print("here")
""",
    "namespaces": CALL
    + """
flags = {"user": 0x10000000, "mnt": 0x20000, "net": 0x40000000, "pid": 0x20000000}
for name, flag in flags.items():
    print("REACHED" if libc.unshare(flag) == 0 else ctypes.get_errno(), name)
    pid = call(56, flag | 17, 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    if pid > 0: print("REACHED clone", name)
for pid in (1, 2):
    try: print("REACHED" if call(308, os.open(f"/proc/{pid}/ns/user", 0), 0) == 0 else "no")
    except OSError as error: print(error)
""",
    "file systems": CALL
    + """
os.makedirs("/tmp/m", exist_ok=True)
print("REACHED" if libc.mount(b"none", b"/tmp/m", b"tmpfs", 0, None) == 0 else ctypes.get_errno())
print("REACHED" if libc.mount(b"proc", b"/tmp/m", b"proc", 0, None) == 0 else ctypes.get_errno())
print("REACHED" if libc.umount2(b"/proc", 2) == 0 else ctypes.get_errno())
print("REACHED" if libc.chroot(b"/tmp/m") == 0 else ctypes.get_errno())
for place, mode in (("/tmp/sda", 0o60600), ("/tmp/mem", 0o20600)):
    try: os.mknod(place, mode, os.makedev(8, 0)); print("REACHED", place)
    except OSError as error: print(error)
""",
    "users": """
import os, subprocess
for change in (os.setuid, os.setgid, os.seteuid):
    try: change(0); print("REACHED")
    except OSError as error: print(error)
try: os.setgroups([0]); print("REACHED")
except OSError as error: print(error)
for command in (["su", "-c", "id"], ["mount", "/tmp"], ["sudo", "-n", "id"]):
    try:
        made = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
        if made.returncode == 0: print("REACHED", command)
    except OSError as error: print(error)
open("/tmp/s", "w").write("#!/bin/sh\\nid -u"); os.chmod("/tmp/s", 0o6755)
print(subprocess.run(["/tmp/s"], capture_output=True).stdout)
""",
    "calls into the kernel": CALL
    + """
for number in (321, 298, 425, 250, 323, 246, 175, 313, 169, 167, 304, 300, 428, 430, 155, 103, 164):
    got = call(number, 0, 0, 0, 0, 0)
    print("REACHED" if got >= 0 or ctypes.get_errno() not in (1, 38) else "no", number)
""",
    "closing descriptors": "import os\nos.closerange(0, 4096)\nos._exit(0)",
    "writing to every descriptor": """
import os
answer = b"\\x06\\0\\0\\0" + b"".join(len(p).to_bytes(4, "little") for p in (b"exited", b"0", b"{right}", b"", b"", b"0"))
answer += b"exited0{right}0"
for number in range(3, 256):
    try: os.write(number, answer); print("REACHED" if number > 3 else "its own", number)
    except OSError: pass
for pid in {1, 2, 3, os.getppid()} - {os.getpid()}:
    for number in range(16):
        try: os.write(os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY), answer); print("REACHED", pid, number)
        except OSError: pass
""",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "huge exit": "import sys\nsys.exit(10**1000)",
    "wild pointer": "import ctypes\nctypes.string_at(1)",
    "sleep": "import time\ntime.sleep(10**6)",
    "endless input": "import sys\nwhile True: sys.stdin.read()",
    "nothing": "import os\nos._exit(0)",
    "secrets": """
import os
for name, value in os.environ.items():
    if "SECRET" in name or "ASTRAFLOW" in name or "CANARY" in value: print("REACHED", name)
for pid in os.listdir("/proc"):
    if pid.isdigit():
        for name in ("environ", "cmdline"):
            try: found = open(f"/proc/{pid}/{name}", "rb").read()
            except OSError: continue
            if b"CANARY" in found: print("REACHED", pid, name)
""",
    "keys on a terminal": """
import fcntl, os, termios
for place in ("/dev/tty", "/dev/console", "/dev/pts/0"):
    try: fcntl.ioctl(os.open(place, os.O_RDWR), termios.TIOCSTI, b"x"); print("REACHED")
    except OSError as error: print(error)
""",
}
