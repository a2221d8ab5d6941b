"""The release of methods with one noised sum of clipped client updates, as the arguments of a strategy describe it."""

from dataclasses import dataclass

from flower_dp.core import checks, compression
from flower_dp.core.participation import MinimumSeparationSampling
from flower_dp.core.sampling import FixedSizeSampling, Sampler, check_sampler
from flower_dp.planning.correlated_noise import CorrelatedNoise
from flower_dp.privacy import accounting
from flower_dp.privacy.events import Relation
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.strategies.releases.adaptive_clip import AdaptiveClip, ClipController
from flower_dp.strategies.releases.correlated_noise import CorrelatedSharing, SeparatedSum
from flower_dp.strategies.releases.masks import Masks
from flower_dp.strategies.releases.noised_sum import NoisedSum, check_relation
from flower_dp.strategies.releases.shared_noise import NoiseSharing

_SEEN_BY = {
    "central": "everyone who sees global models, including the clients; the server is trusted",
    "distributed": (
        "everyone who sees sums or global models, including any single client; the aggregator, which adds up the messages, is "
        "trusted not to look at single ones"
    ),
}
# The fraction of the selected clients that must reply if the server completes no noise.
_MIN_REPLY_RATIO = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedUpdates:
    """The sum of client updates, each clipped to L2 norm `clip_norm`, with noise on the sum; `DPFedSAM` describes its arguments.

    Attributes:
        masks: maker of the mask that all clients of a round share; None for no mask.
        noise: kind of noise that is correlated over the rounds; None for independent noise.
        num_rounds: number of rounds that correlated noise is made for.

    Raises:
        ValueError: if a value is invalid; the message names field and value.
    """

    clip_norm: float | AdaptiveClip
    sampling: Sampler
    num_clients: int
    relation: Relation | None
    placement: str
    server_completes_noise: bool
    min_reply_ratio: float | None
    keep_ratio: float = 1.0
    quantization_levels: int | None = None
    masks: Masks | None = None
    noise: CorrelatedNoise | None = None
    num_rounds: int | None = None

    def __post_init__(self) -> None:
        check_sampler(self.sampling)
        checks.integer("num_clients", self.num_clients, at_least=1)
        checks.one_of("placement", self.placement, tuple(_SEEN_BY))
        checks.number("keep_ratio", self.keep_ratio, above=0, at_most=1)
        checks.flag("server_completes_noise", self.server_completes_noise)
        if self.quantization_levels is not None:
            compression.check_levels(self.quantization_levels)
        if self.min_reply_ratio is not None:
            checks.number("min_reply_ratio", self.min_reply_ratio, above=0, at_most=1)
        central = self.placement == "central"
        unsent = "under 'central' clients send updates without noise, and a function of them is not private"
        topped = "placement='distributed' and server_completes_noise=False only; else the server adds all shares that a sum lacks"
        for name, unread, why in (
            ("quantization_levels", central, f"placement='distributed' only; {unsent}"),
            ("min_reply_ratio", central or self.server_completes_noise, topped),
        ):
            if unread and (value := getattr(self, name)) is not None:
                raise checks.refusal(name, value, f"is read with {why}")
        if central and not self.server_completes_noise:
            why = "is read with placement='distributed' only; under 'central' the server is trusted"
            raise checks.refusal("server_completes_noise", False, why)
        if self.noise is not None:
            if not hasattr(self.noise, "matrix") or isinstance(self.noise, type):
                raise checks.bad("noise", self.noise, "a kind of correlated noise, such as BLT(), or None")
            if not central or self.keep_ratio < 1 or self.masks is not None:
                why = "needs placement='central' and whole updates: errors of earlier rounds would not cancel otherwise"
                raise checks.refusal("noise", self.noise, why)
        if isinstance(self.clip_norm, AdaptiveClip) and self.compresses_noised_updates:
            raise checks.refusal(
                "clip_norm",
                self.clip_norm,
                f"does not work with keep_ratio={self.keep_ratio:g} and "
                f"quantization_levels={self.quantization_levels} under placement='distributed': clients would drop or coarsen "
                "the coordinate by which the clip norm moves; use placement='central', or a fixed clip norm",
            )

    @property
    def compresses_noised_updates(self) -> bool:
        """Whether every client sends only the largest coordinates, or the quantization levels, of its own noised update."""
        return self.placement == "distributed" and (self.keep_ratio < 1 or self.quantization_levels is not None)

    def shared(self, noise_multiplier: float, clip_norm: float = 1.0) -> NoiseSharing:
        """Return the release with this noise multiplier, and the split of its noise.

        Raises:
            ValueError: for a sampler that is not accounted under the neighboring relation.
        """
        default: Relation = "replace-one" if isinstance(self.sampling, FixedSizeSampling) else "add-or-remove-one"
        relation = accounting.parse_relation(self.relation) if self.relation else default
        check_relation(relation, self.sampling, self.num_clients)
        release = Release(
            description="the noised sum of clipped client updates, and every model made from it",
            visible_to=_SEEN_BY[self.placement],
            unit="client",
            relation=relation,
            clip_norm=clip_norm,
            mechanism=Gaussian(noise_multiplier=noise_multiplier),
            sampler=self.sampling,
            num_units=self.num_clients,
        )
        shared = NoiseSharing(
            release=release,
            placement=self.placement,
            server_completes_noise=self.server_completes_noise,
            min_reply_ratio=_MIN_REPLY_RATIO if self.min_reply_ratio is None else self.min_reply_ratio,
            compresses_noised_updates=self.compresses_noised_updates,
        )
        return shared if self.noise is None else CorrelatedSharing.of(shared, self.noise, self.num_rounds)

    def release(self, name: str, noise_multiplier: float) -> tuple[NoisedSum, NoiseSharing]:
        """Return the release of the method with this name on the wire and this noise multiplier, and its noise."""
        shared, moving = self.shared(noise_multiplier), None
        if isinstance(self.clip_norm, AdaptiveClip):
            multiplier, cohort = shared.release.mechanism.noise_multiplier, shared.release.expected_cohort_size
            moving = ClipController(of=self.clip_norm, noise_multiplier=multiplier, expected_cohort_size=cohort)
            norm = moving.indicator(self.clip_norm.min_clip_norm).joint_norm
        else:
            norm = checks.number("clip_norm", self.clip_norm, above=0)
        drawn = shared.with_clip_norm(norm)
        separated = isinstance(self.sampling, MinimumSeparationSampling)
        training = (SeparatedSum if separated else NoisedSum)(
            name=name,
            noise=drawn,
            keep_ratio=self.keep_ratio,
            quantization_levels=self.quantization_levels or 0,
            masks=self.masks,
            clip=moving,
        )
        return training, drawn
