"""Addresses of sockets in the configuration: `tcp://HOST:PORT`, and for the buffer `ipc://PATH` too."""

from ipaddress import ip_address

from configs.rules import Rule


def is_tcp_address(address: str) -> bool:
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    return scheme == "tcp" and bool(host) and ":" not in host and port.isdigit() and int(port) <= 65535


def is_ipc_address(address: str) -> bool:
    return address.startswith("ipc://") and len(address) > len("ipc://")


TCP_ADDRESS = Rule("tcp://HOST:PORT (HOST: a name or an IPv4 address)", is_tcp_address)
TCP_OR_IPC_ADDRESS = Rule(
    "tcp://HOST:PORT (HOST: a name or an IPv4 address) or ipc://PATH",
    lambda address: is_tcp_address(address) or is_ipc_address(address),
)


def host_of(address: str) -> str:
    """Returns the host of a TCP address; for other addresses the loopback interface, on which they stay."""
    return address.removeprefix("tcp://").rpartition(":")[0] if address.startswith("tcp://") else "127.0.0.1"


def names_no_host(address: str) -> bool:
    """True for an address that means "all interfaces": a server can listen there, and nobody can connect to
    it."""
    return address.startswith(("tcp://0.0.0.0:", "tcp://*:"))


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def is_beyond_loopback(address: str) -> bool:
    """True for an address that other hosts can reach, for which sockets need keys."""
    return is_tcp_address(address) and not is_loopback(host_of(address))
