"""Attempts to leave a sandbox. Runs inside of it, with the standard library only; prints one JSON line per attempt.

    python3 -c SOURCE TARGETS [NAME,…]

TARGETS is the JSON of `escapes.Host.targets`: what the host laid out. Where a secret can be read, an attempt
escaped if it reads the canary. The canary's text is given reversed, so that it stands in no memory as it is. The three
attempts of `JUDGED_OUTSIDE` are judged by the host.
"""

import ctypes
import errno
import glob
import json
import os
import signal
import socket
import struct
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
JUDGED_OUTSIDE = ("write_outside", "time_bomb", "odd_names")
ATTEMPT_S = 15
NEWUSER = 0x10000000
ATTEMPTS = {}


def attempt(function):
    ATTEMPTS[function.__name__] = function
    return function


def call(number, *arguments):
    """Make a system call."""
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def works(function, *arguments):
    try:
        function(*arguments)
    except OSError:
        return False
    return True


class Attempts:
    """The attempts that need to know what the host laid out."""

    def __init__(self, targets):
        self.targets = targets
        self.canary = targets["canary"][::-1].encode()

    def has_canary(self, content):
        return self.canary in content

    def reads(self, *paths):
        """The paths whose content is the canary's."""
        found = []
        for path in paths:
            try:
                with open(path, "rb") as file:
                    if self.has_canary(file.read(1 << 20)):
                        found.append(path)
            except OSError:
                pass
        return found

    def connects(self, family, address, kind=socket.SOCK_STREAM):
        """Whether a server at the address sends the canary."""
        with socket.socket(family, kind) as line:
            line.settimeout(2)
            try:
                line.connect(address)
                if kind == socket.SOCK_DGRAM:
                    line.send(b"?")
                return self.has_canary(line.recv(4096))
            except OSError:
                return False


@attempt
def secret_file(a):
    return a.reads(a.targets["secret"])


@attempt
def shadow_file(a):
    return works(open, "/etc/shadow")


@attempt
def run_directory(a):
    return a.reads(a.targets["run"] + "/control.db")


@attempt
def answer_key(a):
    return a.reads(a.targets["answer"])


@attempt
def sibling_files(a):
    return a.reads(a.targets["sibling"], *glob.glob("/srv/*/box/sibling.txt"), *glob.glob("/mnt/*/box/sibling.txt"))


@attempt
def environment(a):
    return [key for key, value in os.environ.items() if a.has_canary(value.encode())]


@attempt
def proc_of_others(a):
    processes = [name for name in os.listdir("/proc") if name.isdigit()] + [str(a.targets["owner"])]
    names = ("environ", "cmdline", "root" + a.targets["secret"], "cwd/../secret/canary")
    return a.reads(*(f"/proc/{process}/{name}" for process in processes for name in names))


@attempt
def inherited_descriptors(a):
    found = []
    for name in os.listdir("/proc/self/fd"):
        file = int(name)
        if file < 3:
            continue
        try:
            if a.has_canary(os.pread(file, 1 << 16, 0)):
                found.append(file)
        except OSError:
            pass
        for path in ("../" * 8 + a.targets["secret"].lstrip("/"), a.targets["secret"].lstrip("/")):
            try:
                opened = os.open(path, os.O_RDONLY, dir_fd=file)
                if a.has_canary(os.read(opened, 4096)):
                    found.append((file, path))
            except OSError:
                pass
    return found


@attempt
def trace_owner(a):
    return works(call, 101, 0x4206, a.targets["owner"], 0, 0)  # PTRACE_SEIZE


@attempt
def trace_child(a):
    """Tracing a process of one's own can change system calls after the filter has seen them."""
    child = os.fork()
    if child == 0:
        time.sleep(3)
        os._exit(0)
    try:
        return works(call, 101, 0x4206, child, 0, 0)
    finally:
        os.kill(child, signal.SIGKILL)


@attempt
def memory_of_owner(a):
    for process in {a.targets["owner"], os.getppid(), 1} - {os.getpid()}:
        try:
            with open(f"/proc/{process}/maps") as file:
                lines = file.readlines()
        except OSError:
            continue
        for line in lines:
            span, rights = line.split()[:2]
            low, high = (int(part, 16) for part in span.split("-"))
            if "r" not in rights or high - low > 64 << 20:
                continue
            buffer = ctypes.create_string_buffer(high - low)
            here, there = (
                (ctypes.c_ulong * 2)(ctypes.addressof(buffer), high - low),
                (ctypes.c_ulong * 2)(low, high - low),
            )
            if works(call, 310, process, here, 1, there, 1, 0) and a.has_canary(buffer.raw):
                return process
    return False


@attempt
def descriptors_of_owner(a):
    try:
        owner = call(434, a.targets["owner"], 0)  # pidfd_open
    except OSError:
        return False
    return [file for file in range(3, 64) if works(call, 438, owner, file, 0)]  # pidfd_getfd


@attempt
def loopback(a):
    addresses = [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0"),
        (socket.AF_INET6, "::1"),
        (socket.AF_INET, a.targets["address"]),
    ]
    return [address for family, address in addresses if a.connects(family, (address, a.targets["port"]))]


@attempt
def loopback_udp(a):
    return a.connects(socket.AF_INET, ("127.0.0.1", a.targets["udp"]), socket.SOCK_DGRAM)


@attempt
def abstract_socket(a):
    return a.connects(socket.AF_UNIX, "\0" + a.targets["abstract"])


@attempt
def path_socket(a):
    return a.connects(socket.AF_UNIX, a.targets["socket"])


def _opens_family(family, kind, protocol=0):
    return works(lambda: socket.socket(family, kind, protocol).close())


@attempt
def vsock(a):
    return _opens_family(40, socket.SOCK_STREAM)


@attempt
def packet_sockets(a):
    return _opens_family(17, socket.SOCK_RAW) or _opens_family(2, socket.SOCK_RAW, 1)


@attempt
def odd_families(a):
    """Families whose kernel code few programs need: alg, bluetooth, xdp, kcm, rds, tipc, can."""
    kinds = {
        38: socket.SOCK_SEQPACKET,
        31: socket.SOCK_RAW,
        44: socket.SOCK_RAW,
        41: socket.SOCK_SEQPACKET,
        21: socket.SOCK_SEQPACKET,
        30: socket.SOCK_SEQPACKET,
        29: socket.SOCK_RAW,
    }
    return [family for family, kind in kinds.items() if _opens_family(family, kind)]


@attempt
def link_out(a):
    os.symlink(a.targets["secret"], "link")
    os.symlink(os.path.dirname(a.targets["secret"]), "directory")
    return a.reads("link", "directory/canary")


@attempt
def hard_link_out(a):
    return works(os.link, a.targets["secret"], "hard") and a.reads("hard")


@attempt
def device_nodes(a):
    found = []
    for name, mode, device in (("disk", 0o60666, (254, 0)), ("mem", 0o20666, (1, 1)), ("kmsg", 0o20666, (1, 11))):
        if works(os.mknod, name, mode, os.makedev(*device)) and works(os.open, name, os.O_RDONLY | os.O_NONBLOCK):
            found.append(name)
    return found


@attempt
def devices(a):
    names = ("vda", "sda", "mem", "kmsg", "kvm", "fuse", "net/tun", "port", "nvidia0", "vhost-vsock", "loop-control")
    return [name for name in names if works(os.open, f"/dev/{name}", os.O_RDWR | os.O_NONBLOCK)]


@attempt
def new_privileges(a):
    with open("/proc/self/status") as file:
        flags = dict(line.split(":", 1) for line in file)
    return flags["NoNewPrivs"].strip() != "1"


@attempt
def capabilities(a):
    with open("/proc/self/status") as file:
        flags = dict(line.split(":", 1) for line in file)
    return any(int(flags[name], 16) for name in ("CapEff", "CapPrm", "CapAmb"))


@attempt
def mounts(a):
    kinds = (
        ("t", "/tmp", "tmpfs", 0),
        ("/", "/tmp", "", 4096 | 16384),
        ("/usr", "/usr", "", 32 | 4096),
        ("proc", "/tmp", "proc", 0),
    )
    for source, target, kind, flags in kinds:
        if LIBC.mount(source.encode(), target.encode(), kind.encode() or None, flags, None) == 0:
            return kind or source
    return [path for path in ("/proc", "/dev", "/usr") if LIBC.umount2(path.encode(), 2) == 0]


@attempt
def new_mount_interface(a):
    return works(call, 430, b"tmpfs", 0) or works(call, 428, -100, b"/", 1)  # fsopen, open_tree


@attempt
def user_namespace(a):
    return works(call, 272, NEWUSER)  # unshare


def _child_of(number, *arguments):
    """Whether a call that forks does so; the child ends at once."""
    child = LIBC.syscall(number, *arguments)
    if child == 0:
        os._exit(0)
    if child > 0:
        os.waitpid(child, 0)
    return child > 0


@attempt
def user_namespace_by_clone(a):
    return _child_of(56, NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)


@attempt
def user_namespace_by_clone3(a):
    arguments = ctypes.create_string_buffer(struct.pack("<11Q", NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0))
    return _child_of(435, arguments, 88)


@attempt
def join_namespace(a):
    for kind in ("net", "mnt", "pid", "user", "ipc"):
        for process in (1, a.targets["owner"]):
            try:
                namespace = os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY)
            except OSError:
                continue
            if works(call, 308, namespace, 0):
                return kind
    return False


@attempt
def keyring(a):
    for ring in (-3, -4, -5, -2):  # session, user, user session, process
        try:
            key = call(250, 10, ring, b"user", b"agentrl:canary", 0)
            buffer = ctypes.create_string_buffer(4096)
            if a.has_canary(buffer.raw[: call(250, 11, key, buffer, 4096)]):
                return ring
        except OSError:
            pass
    return False


@attempt
def add_key(a):
    return works(call, 248, b"user", b"x", b"y", 1, -2)


@attempt
def io_uring(a):
    return works(call, 425, 4, ctypes.create_string_buffer(240))


@attempt
def bpf(a):
    return works(call, 321, 5, ctypes.create_string_buffer(128), 128)


@attempt
def performance_events(a):
    return works(call, 298, ctypes.create_string_buffer(128), 0, -1, -1, 0)


@attempt
def user_faults(a):
    return works(call, 323, 1)


@attempt
def kernel_log(a):
    return works(call, 103, 3, ctypes.create_string_buffer(64), 64)


@attempt
def file_handles(a):
    return works(call, 304, -100, ctypes.create_string_buffer(128), 0)


@attempt
def secret_memory(a):
    return works(call, 447, 0)


@attempt
def uncounted_memory(a):
    return works(call, 319, b"x", 0)  # memfd_create: no limit counts it


@attempt
def shared_mapping(a):
    import mmap

    return works(mmap.mmap, -1, 4096)  # no limit counts it


@attempt
def shared_mapping_of_zeros(a):
    import mmap

    with open("/dev/zero", "r+b") as device:
        return works(mmap.mmap, device.fileno(), 4096)  # no limit counts it


@attempt
def growing_input(a):
    """Where the standard input is a file in memory, writing to it is memory that no limit counts."""
    return works(os.ftruncate, 0, 1 << 20)


@attempt
def new_calls(a):
    """System calls newer than the filter."""
    found = []
    for number in (467, *range(470, 480)):
        try:
            call(number, -1, 0, 0, 0, 0)
            found.append(number)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOSYS):
                found.append(number)
    return found


@attempt
def file_notifications(a):
    return works(call, 300, 0, 0)  # fanotify_init


@attempt
def swap(a):
    return works(call, 167, b"/x", 0)


@attempt
def signal_outside(a):
    return [process for process in (a.targets["owner"], a.targets["victim"]) if works(os.kill, process, signal.SIGUSR1)]


@attempt
def kernel_settings(a):
    paths = (
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/proc/sys/vm/drop_caches",
        "/sys/kernel/mm/transparent_hugepage/enabled",
    )
    return [path for path in paths if works(os.open, path, os.O_WRONLY)]


@attempt
def cgroup_files(a):
    paths = ("/sys/fs/cgroup/memory/tasks", "/sys/fs/cgroup/pids/cgroup.procs", "/sys/fs/cgroup/cgroup.procs")
    return [path for path in paths if works(os.open, path, os.O_WRONLY)]


@attempt
def terminal(a):
    import fcntl

    return works(lambda: fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), 0x5412, b"x"))


@attempt
def shared_memory(a):
    segment = LIBC.shmget(a.targets["shared_memory"], 4096, 0o600)
    if segment < 0:
        return False
    LIBC.shmat.restype = ctypes.c_void_p
    address = LIBC.shmat(segment, None, 0)
    return address not in (None, ctypes.c_void_p(-1).value) and a.has_canary(ctypes.string_at(address, 4096))


@attempt
def posix_shared_memory(a):
    return a.reads("/dev/shm/" + a.targets["posix_shared_memory"])


@attempt
def priority(a):
    return works(os.setpriority, os.PRIO_PROCESS, 0, -10) or works(
        os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(10)
    )


@attempt
def clock(a):
    """Set the clock to what it is. The control run leaves this out: no namespace contains the clock."""
    now = time.time()
    return not a.targets["control"] and LIBC.syscall(227, 0, struct.pack("qq", int(now), int(now % 1 * 1e9))) == 0


@attempt
def host_name(a):
    return LIBC.sethostname(b"changed", 7) == 0 and os.readlink("/proc/self/ns/uts") == a.targets["uts"]


@attempt
def change_root(a):
    os.mkdir("jail")
    here = os.open(".", os.O_RDONLY)
    try:
        os.chroot("jail")
        os.fchdir(here)
        for _ in range(64):
            os.chdir("..")
        return a.reads(a.targets["secret"].lstrip("/"))
    except OSError:
        return False


@attempt
def personality(a):
    """READ_IMPLIES_EXEC and ADDR_NO_RANDOMIZE weaken the programs that run afterwards."""
    return works(call, 135, 0x0440000)


@attempt
def write_outside(a):
    for directory in a.targets["writable"]:
        try:
            with open(f"{directory}/escape-{a.targets['tag']}", "w") as file:
                file.write("x")
        except OSError:
            pass
    return None


@attempt
def time_bomb(a):
    """Leave a process behind that ignores signals, under the name of a kernel thread."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            LIBC.prctl(1, 0)
            LIBC.prctl(15, b"kworker/9", 0, 0, 0)
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            for _ in range(200):
                with open("heartbeat", "w") as file:
                    file.write(str(time.time()))
                time.sleep(0.1)
        os._exit(0)
    return None


@attempt
def odd_names(a):
    """Names, links and trees that a copy out of the sandbox has to survive."""
    here = os.getcwd()
    try:
        os.makedirs("deep")
        os.chdir("deep")
        for _ in range(2000):
            os.mkdir("d" * 50)
            os.chdir("d" * 50)
    except OSError:
        pass
    os.chdir(here)
    for name in ("new\nline", "\x1b[31mred", "a" * 255, "-rf", "..."):
        works(open, name, "w")
    works(os.mkfifo, "pipe")
    works(lambda: os.truncate(os.open("sparse", os.O_WRONLY | os.O_CREAT), 1 << 45))
    os.makedirs("closed/x", exist_ok=True)
    os.chmod("closed", 0)
    return None


def main():
    attempts = Attempts(json.loads(sys.argv[1]))
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else list(ATTEMPTS)
    for name in names:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            if name != "time_bomb":
                signal.alarm(ATTEMPT_S)
            try:
                outcome = ATTEMPTS[name](attempts)
            except BaseException:  # noqa: BLE001 - an attempt that fails has not escaped
                outcome = None if name in JUDGED_OUTSIDE else False
            os.write(
                write_end, json.dumps([name, None if outcome is None else bool(outcome), str(outcome)[:200]]).encode()
            )
            os._exit(0)
        os.close(write_end)
        line = b""
        while part := os.read(read_end, 4096):
            line += part
            if line.endswith(b"]"):
                break  # what was left behind may hold the pipe open
        os.close(read_end)
        os.waitpid(child, 0)
        print(line.decode() or json.dumps([name, False, "ended by a signal"]), flush=True)


if __name__ == "__main__":
    main()
