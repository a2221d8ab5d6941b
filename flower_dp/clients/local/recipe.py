"""Protocols of the client side of a local DP method."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from flower_dp.clients.reply.pipeline import Pipeline
from flower_dp.clients.training.recipe import FlatModel
from flower_dp.clients.training.records import Records
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.release import Release


class LocalRecipe(Protocol):
    """The recipe of one client's reply with full noise (local DP)."""

    @property
    def method(self) -> str:
        """Name of the method."""

    def terms(self, name: str, records: Records) -> ClientTerms:
        """Return the client's terms, from its own budget and data size alone."""

    def pipeline(self, release: Release, *, model: FlatModel, server_round: int) -> Pipeline:
        """Return the pipeline of one client's reply, with the clip and the noise of its own release."""


@runtime_checkable
class Stateful(Protocol):
    """A recipe whose clients keep a vector from round to round (`Pipeline.keep`), or work with vectors of the request."""

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the vectors that the server sends with the model."""

    def with_vectors(self, vectors: Mapping[str, Tensor], kept: Tensor | None) -> LocalRecipe:
        """Return the recipe of one client's reply in one round.

        Args:
            vectors: public vectors of the request [d], float32, by name.
            kept: vector [d] that the client has kept, float32; None in its first round, and if the vector was lost.
        """


@runtime_checkable
class ModelPreconditions(Protocol):
    """A recipe whose proof has conditions on the server's message. Its clients check them before they pay and reply."""

    def refusal_reason(self, vector: Tensor, *, model: FlatModel, server_round: int) -> str | None:
        """Return why a client must not reply to a model [d], in a text that the server may see; None if it may.

        Args:
            vector: model of the server.
            model: model of the client.
            server_round: round number of the server.
        """


@runtime_checkable
class DryRunnable(Protocol):
    """A recipe that does a dry run on synthetic records."""

    def unfit_reason(self, model: FlatModel, records: Records) -> str | None:
        """Return why no record of the client's public shape and type can be trained on; None if one can, or in doubt.

        The text is one of `flower_dp.clients.refusal_messages`; no record decides it.
        """
