"""A server with the users of deploy/users.conf, one for each role."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.client import Broker, BrokerConfig, connect
from kvstore.embedded import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

USERS = Path(__file__).parents[3] / "deploy" / "users.conf"
ROLES = ("gateway", "worker", "batch", "operator")


@dataclass
class Server:
    """A server with a user for each role."""

    url: str
    """Of nobody."""
    roles: dict[str, Broker]
    admin: Broker

    def by(self, role: str) -> str:
        return self.roles[role].config.url


@asynccontextmanager
async def running_server(binary: Path, folder: Path) -> AsyncIterator[Server]:
    """Whoever comes in without a name is nobody. Users' passwords are `secret-of-ROLE`; its own folder has the file."""
    conf = USERS.read_text()
    for role in ROLES:
        conf = conf.replace(f">{role.upper()}-PASSWORD", f">secret-of-{role}")
    # Until the server is known to answer; then nobody comes in without a name, as the file has it.
    assert "\nuser default off\n" in conf
    users = folder / "users.conf"
    users.write_text(conf.replace("user default off", "user admin on >secret-of-admin ~* &* +@all"))
    async with (
        EmbeddedBroker(binary=binary, options={"include": str(users)}) as server,
        AsyncExitStack() as stack,
    ):
        brokers = {}
        for role in (*ROLES, "admin"):
            url = server.url.replace("redis://", f"redis://{role}:secret-of-{role}@")
            brokers[role] = await connect(BrokerConfig(url))
            stack.push_async_callback(brokers[role].close)
        admin = brokers.pop("admin")
        await admin.call("ACL", "SETUSER", "default", "off")
        await admin.call("ACL", "LOG", "RESET")
        yield Server(server.url, brokers, admin)
