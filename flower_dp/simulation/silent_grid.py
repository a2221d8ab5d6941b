"""A Grid that sends nothing, for a ServerApp that only says what a run has released."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from flower_dp.simulation.identity import SERVER_NODE, run_of
from flower_dp.simulation.worker import Value


class SilentGrid(Grid):
    """A Grid without nodes.

    Args:
        run_config: the settings of the ServerApp.
    """

    simulated = True

    def __init__(self, run_config: Mapping[str, Value]) -> None:
        self._run_config = dict(run_config)

    def server_context(self) -> Context:
        """Return the context of the ServerApp."""
        return Context(run_id=1, node_id=SERVER_NODE, node_config={}, state=RecordDict(), run_config=dict(self._run_config))

    def set_run(self, run: Any) -> None:
        """Take no run."""

    @property
    def run(self) -> Any:
        """A record of no run."""
        return run_of(1)

    def create_message(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: there is nobody to send it to."""
        raise RuntimeError("no message is sent: the run has ended, or its statement alone is made")

    def get_node_ids(self) -> Iterable[int]:
        """Return no node."""
        return []

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        """Raise: nothing is sent."""
        self.create_message()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return nothing."""
        return []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> NoReturn:
        """Raise: nothing is sent."""
        self.create_message()
