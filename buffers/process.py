"""Settings of a server's own process: file descriptors and freed memory."""

import ctypes
import resource


def allow_many_connections() -> None:
    """Raises the process's own limit of open files as far as it may.

    Each connection takes a file descriptor.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def keep_freed_memory() -> None:
    """Lets the C library keep the memory that messages have freed. Otherwise every large message costs fresh
    pages, which is a third of the speed.

    Calls `mallopt` of glibc: up to 256 MB stay with the process, and blocks up to 32 MB come from there.
    Other C libraries have no such call.
    """
    trim_threshold, mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    mallopt(trim_threshold, 256 << 20)
    mallopt(mmap_threshold, 32 << 20)


def give_back_freed_memory() -> None:
    """Gives all pages that hold nothing back to the system, in every thread's arena.

    Calls `malloc_trim` of glibc. By itself glibc gives pages back only at the end of an arena.
    """
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
