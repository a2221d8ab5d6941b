"""A node's answer to the client query: the clients that it hosts, the methods that they run, and whether they can train."""

from collections import Counter

import msgspec
from flwr.app import RecordDict

from flower_dp.core import checks
from flower_dp.wire import structs

# Of a message: an honest answer has one record.
_MOST_RECORDS = 8
_MOST_METHODS = 64
# Characters of an answer besides its names; of a name on average, quotes included.
_BESIDE_NAMES, _PER_NAME = 4096, 256
_MOST_REASON = 500


class HostedClients(structs.Part, frozen=True, kw_only=True):
    """A node's answer: the clients that it hosts, each name once, and the methods that they run.

    Attributes:
        names: of the clients.
        methods: their names.
        unable: why none of the clients can train, as a dry run on the node has found; empty if one can.
        error: why the node can't say whom it hosts; empty if it can.

    Raises:
        ValueError: if a name stands twice, or is no line of printable characters.

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
            raise ValueError(f"clients: {twice[0]!r} is named twice: names must be unique")
        if len(self.methods) > _MOST_METHODS:
            raise ValueError(f"methods: has {len(self.methods)} names: at most {_MOST_METHODS}")
        for method in self.methods:
            checks.line("methods: name", method)

    def to_json(self) -> str:
        """Return the answer as one string."""
        return structs.write(self)


def hosted_of(content: RecordDict, *, most_names: int) -> HostedClients | None:
    """Read a node's answer to the client query; None if it is no answer of this package.

    Args:
        content: of the reply.
        most_names: how many clients the node may name. It also limits the size of the answer and the effort to read it.

    Raises:
        ValueError: if the answer is malformed, names more clients, or says that the node has none; the text says why.
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
