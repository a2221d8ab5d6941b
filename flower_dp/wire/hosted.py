"""A node's reply to the client query: its clients, their methods, and whether they can train."""

from collections import Counter

import msgspec
from flwr.app import RecordDict

from flower_dp.core import checks
from flower_dp.wire import structs

# Records of a message: an honest reply has one.
_MOST_RECORDS = 8
_MOST_METHODS = 64
# Characters of a reply besides its names; characters of a name on average, quotes included.
_BESIDE_NAMES, _PER_NAME = 4096, 256
_MOST_REASON = 500


class HostedClients(structs.Part, frozen=True, kw_only=True):
    """A node's reply to the client query: the clients that it hosts, and their methods.

    Attributes:
        names: client names, each once.
        methods: names of the methods that the clients run.
        unable: reason why none of the clients can train, from the node's dry run; empty if one can.
        error: reason why the node can't name its clients; empty if it can.

    Raises:
        ValueError: if a name occurs twice, or is not one line of printable characters.

    Example:
        >>> from flower_dp.wire import HostedClients
        >>> HostedClients(names=("hospital-7",), methods=frozenset({"dp-fedavg"})).names
        ('hospital-7',)
    """

    names: tuple[str, ...] = msgspec.field(name="clients")
    methods: frozenset[str]
    unable: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        for name in self.names:
            checks.line("client name", name)
        if twice := [name for name, count in Counter(self.names).items() if count > 1]:
            raise ValueError(f"clients: {twice[0]!r} is named twice: must be unique names")
        if len(self.methods) > _MOST_METHODS:
            raise ValueError(f"methods: has {len(self.methods)} names: must be at most {_MOST_METHODS}")
        for method in self.methods:
            checks.line("methods: name", method)

    def to_json(self) -> str:
        """Return the reply as one string."""
        return structs.write(self)


def hosted_of(content: RecordDict, *, most_names: int) -> HostedClients | None:
    """Read a node's reply to the client query; None if this package did not write it.

    Args:
        content: content of the reply.
        most_names: number of clients that the node may name, which also limits the size of the reply and the effort to read it.

    Raises:
        ValueError: with the reason, if the reply is malformed, names more clients, or has an error.
    """
    configs = list(content.config_records.values())[:_MOST_RECORDS]
    text = next((text for record in configs if isinstance(text := record.get(structs.KEY), str)), None)
    if text is None:
        return None
    try:
        hosted = structs.read(HostedClients, text, most=_BESIDE_NAMES + _PER_NAME * most_names)
    except ValueError as error:
        raise ValueError(f"it has no clients: {error}") from None
    if hosted.error:
        raise ValueError(f"it has no clients: {checks.one_line(hosted.error, most=_MOST_REASON)}")
    if len(hosted.names) > most_names:
        raise ValueError(f"it names {len(hosted.names)} clients: at most {most_names} (max_clients_per_node)")
    return msgspec.structs.replace(hosted, unable=checks.one_line(hosted.unable, most=_MOST_REASON))
