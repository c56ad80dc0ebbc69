"""Nothing is called that Windows lacks; what only Linux keeps in files is read in few places, and may be absent."""

import ast
from pathlib import Path

import pytest

from ghostexport.benchmarking import energy, machine
from ghostexport.sizing import capacity
from tests.structure.test_imports import FILES

#: The standard library's modules that Python on Windows does not have.
MODULES = {"crypt", "curses", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios"}
MODULES |= {"tty", "spwd", "ossaudiodev", "pipes"}
#: Attributes of ``os``, ``signal``, ``socket``, ``time`` and ``asyncio`` loops that exist on Unix only.
ATTRIBUTES = {
    *(
        "chown",
        "chroot",
        "confstr",
        "ctermid",
        "fchdir",
        "fchmod",
        "fchown",
        "fork",
        "forkpty",
        "fpathconf",
        "fstatvfs",
    ),
    *("getegid", "geteuid", "getgid", "getgroups", "getloadavg", "getpgid", "getpgrp", "getpriority", "getresuid"),
    *(
        "getsid",
        "getuid",
        "initgroups",
        "killpg",
        "lchown",
        "lockf",
        "major",
        "memfd_create",
        "minor",
        "mkfifo",
        "mknod",
    ),
    *("nice", "openpty", "pathconf", "pipe2", "posix_fadvise", "posix_fallocate", "posix_spawn", "pread", "preadv"),
    *("pwrite", "pwritev", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_yield", "sendfile"),
    *("setegid", "seteuid", "setgid", "setpgid", "setpriority", "setsid", "setuid", "splice", "statvfs", "sync"),
    *("sysconf", "tcgetpgrp", "ttyname", "uname", "wait", "wait3", "wait4", "waitid", "WNOHANG"),
    *("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP", "SIGUSR1"),
    *("SIGUSR2", "alarm", "pause", "pthread_kill", "setitimer", "sigwait", "AF_UNIX", "socketpair", "tzset"),
    *("clock_gettime", "add_signal_handler", "O_DIRECT", "O_NOFOLLOW", "O_CLOEXEC"),
}
OWNERS = {"os", "signal", "socket", "time", "loop"}
#: Where files of Linux are read.
LINUX = {Path(module.__file__).resolve() for module in (machine, energy, capacity)}


def unix_only(tree):
    """What a file imports or calls that Windows lacks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {alias.name for alias in node.names}
            if node.module in MODULES:
                yield node.module
            yield from (f"{node.module}.{name}" for name in names & ATTRIBUTES if node.module in OWNERS)
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES and ast.unparse(node.value) in OWNERS:
            yield ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg in {"preexec_fn", "start_new_session", "pass_fds", "dir_fd"}:
            yield node.arg


def test_no_file_calls_what_only_unix_has():
    found = {path.name: found for path in FILES if (found := [*unix_only(ast.parse(path.read_text("utf-8")))])}
    assert found == {}


@pytest.mark.parametrize(
    "line", ["import fcntl", "from os import fork", "os.sysconf('SC_PAGE_SIZE')", "Popen(x, start_new_session=True)"]
)
def test_the_check_sees_calls_of_unix(line):
    assert len([*unix_only(ast.parse(line))]) == 1


def test_files_of_linux_are_read_in_three_modules():
    readers = {
        path.resolve()
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant)
        and str(node.value).startswith(("/proc", "/sys", "/dev", "/etc", "/tmp", "/usr"))
    }
    assert readers == LINUX
