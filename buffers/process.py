"""What a server asks of its process."""

import ctypes
import resource


def allow_many_connections() -> None:
    """Each connection takes a file descriptor: raises the process's own limit as far as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def keep_freed_memory() -> None:
    """Lets the C library keep what messages have freed: else every large message costs fresh pages (a third of the speed).

    `mallopt` of glibc: up to 256 MB stay with the process, and blocks up to 32 MB come from there. Other C libraries have none.
    """
    trim_threshold, mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    mallopt(trim_threshold, 256 << 20)
    mallopt(mmap_threshold, 32 << 20)


def give_back_freed_memory() -> None:
    """Gives back all pages that hold nothing, of every thread's arena: `malloc_trim` of glibc, which does so by itself only at the end
    of an arena."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
