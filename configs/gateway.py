"""`episodes.gateway`: the address at which agents ask the policy over HTTP."""

from dataclasses import dataclass

from configs.addresses import is_loopback
from configs.rules import POSITIVE, Rule
from configs.setting import Condition, Section, setting

PORT = Rule("a port from 0 to 65535 (0: any free one)", lambda port: 0 <= port <= 65535)


@dataclass(kw_only=True, slots=True)
class GatewayConfig(Section):
    """The HTTP endpoint of each generator, for tasks that run an agent (`docs/environments.md`)."""

    host: str = setting("127.0.0.1")
    """Interface of the generator's host, under the name that agents know. Beyond the loopback interface it
    needs `buffer.keys`, and a network that you trust: requests are not encrypted."""
    port: int = setting(0, PORT)
    """Port of the endpoint. 0: any free one."""
    max_body_mb: int = setting(4, POSITIVE)
    """Largest body of a request, in MB. More is answered with 413."""

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                self.host not in ("", "0.0.0.0", "*", "::"),
                "episodes.gateway.host",
                "name a host (agents connect to it)",
                f"{self.host!r}",
            )
        ]

    @property
    def is_beyond_loopback(self) -> bool:
        """True when other hosts can reach the endpoint."""
        return not is_loopback(self.host)
