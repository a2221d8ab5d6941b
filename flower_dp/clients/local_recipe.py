"""The client side of a method whose every message is private on its own."""

from typing import Protocol

from flower_dp.clients.pipeline import Pipeline
from flower_dp.clients.records import Records
from flower_dp.clients.training import FlatModel
from flower_dp.privacy.client_terms import Terms
from flower_dp.privacy.release import Release


class LocalRecipe(Protocol):
    """How one client makes a reply that is private on its own."""

    @property
    def method(self) -> str:
        """Name of the method."""

    def terms(self, name: str, records: Records) -> Terms:
        """Return the client's terms, from its own budget and data size alone."""

    def pipeline(self, release: Release, *, model: FlatModel, server_round: int) -> Pipeline:
        """Return the pipeline of one client's reply, with the clip and the noise of its own release."""
