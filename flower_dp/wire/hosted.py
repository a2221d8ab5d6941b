"""A node's answer to the client query: the clients that it hosts, the methods that they run, and whether they can train."""

import json
import re
from dataclasses import dataclass

from flwr.app import RecordDict

from flower_dp.core import checks
from flower_dp.wire.text import KEY

# Of a message: an honest answer has one record.
_MOST_RECORDS = 8
_MOST_METHODS = 64
# Characters of an answer besides its names; of a name on average, quotes included.
_BESIDE_NAMES, _PER_NAME = 4096, 256
_MOST_REASON = 500
# A JSON text, or the rest of the answer where one does not end.
_TEXT = re.compile(r'"(?:[^"\\]|\\.?)*+(?:"|\Z)', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """A node's answer: the clients that it hosts, each name once, and the methods that they run.

    Attributes:
        names: of the clients.
        methods: their names.
        unable: why none of the clients can train, as a dry run on the node has found; empty if one can.

    Raises:
        ValueError: if a name stands twice.

    Example:
        >>> from flower_dp.wire import Hosted
        >>> Hosted(names=("hospital-7",), methods=frozenset({"dp-fedavg"})).names
        ('hospital-7',)
    """

    names: tuple[str, ...]
    methods: frozenset[str]
    unable: str = ""

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"clients: {twice!r} is named twice: names must be unique")


def hosted_of(content: RecordDict, *, most_names: int) -> Hosted | None:
    """Read a node's answer to the client query; None if it is no answer of this package.

    Args:
        content: of the reply.
        most_names: how many clients the node may name. It also limits the size of the answer and the effort to read it.

    Raises:
        ValueError: if the answer is malformed, names more clients, or says that the node has none; the text says why.
    """
    for record in list(content.config_records.values())[:_MOST_RECORDS]:
        if isinstance(text := record.get(KEY), str):
            return _read(text, most_names)
    return None


def _read(text: str, most_names: int) -> Hosted:
    data = _flat(text, most_names)
    names, methods = data.get("clients"), data.get("methods")
    if "error" in data or not isinstance(names, list):
        raise ValueError(f"it has no clients: {checks.one_line(str(data.get('error', 'a malformed answer')), most=_MOST_REASON)}")
    if len(names) > most_names:
        raise ValueError(f"it names {len(names)} clients: at most {most_names} (most_clients_per_node)")
    clients = tuple(checks.line("it has no clients: client name", name) for name in names)
    if not isinstance(methods, list) or len(methods) > _MOST_METHODS:
        shown = checks.one_line(str(methods), most=_MOST_REASON)
        raise ValueError(f"methods={shown}: must be at most {_MOST_METHODS} names; is its flower-dp an older release?")
    unable = checks.one_line(str(data.get("unable", "")), most=_MOST_REASON)
    return Hosted(names=clients, methods=frozenset(checks.line("methods: name", method) for method in methods), unable=unable)


def _flat(text: str, most_names: int) -> dict[str, object]:
    """Return the table in an answer; one that is too long, nested, or of too many entries is refused before it is parsed."""
    most = _BESIDE_NAMES + _PER_NAME * most_names
    if len(text) > most:
        raise ValueError(f"its list of clients has {len(text)} characters: at most {most} for {most_names} clients")
    frame = _TEXT.sub("", text)
    if frame.count("[") + frame.count("{") > 3 or frame.count(",") > most_names + _MOST_METHODS:
        raise ValueError(f"it has no clients: a malformed answer, or more than {most_names} names (most_clients_per_node)")
    try:
        data = json.loads(text)
    except ValueError:
        raise ValueError("it has no clients: its answer is not JSON") from None
    if not isinstance(data, dict):
        raise ValueError("it has no clients: a malformed answer")
    return data
