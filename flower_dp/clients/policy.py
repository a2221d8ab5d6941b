"""A client's own policy: the instructions that it accepts from any server."""

import math
from dataclasses import dataclass, fields

from flower_dp.clients.refusal_messages import Declined
from flower_dp.core import checks
from flower_dp.privacy.release import Release
from flower_dp.wire import ReleaseRequest

# The relative difference between two ways to compute one ratio.
_ROUNDING = 1e-9
# Limits that are whole numbers, at least 1.
_WHOLE = ("max_shares", "min_separation", "max_participations")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPolicy:
    """Limits that a client sets for its own protection; it refuses instructions beyond them.

    A policy without any limit trusts the server: it accepts every instruction. A policy with at least one limit accepts nothing
    that it has no limit for. It then refuses training unless it says how much noise training needs, in all
    (`min_noise_multiplier`) or on the device (`min_noise_std`), and evaluations unless it says how much noise they need. Limits
    of evaluation default to those of training. A limit of 0 is a limit: it says that no noise is enough.

    Under local DP (`LocalDPClient`, `privacy_mod` with terms) the client's own terms are the limit. A policy's limits of the
    noise multiplier are then compared with the client's own noise, never with the server's promise. Limits of the clip norm are
    compared with the request's. A `min_noise_std` above 0 refuses all training.

    Attributes:
        max_clip_norm: maximum clip norm of an update; None for any.
        min_clip_norm: minimum clip norm of an update; None for any.
        min_noise_multiplier: minimum noise multiplier that the server must promise for the whole release.
        min_noise_std: minimum std of the noise that this client itself adds; it refuses instructions with less noise on the
            device. It needs `max_clip_norm`: under a clip that the server chooses no noise is enough. If the server's clip norm
            is adaptive, the noise is first scaled to a row, indicator included, of norm `max_clip_norm`.
        max_shares: maximum number of shares that may make up the noise of a release. This client itself must then add noise of
            std (noise multiplier promised x clip norm) / sqrt(max_shares) at least, in training and in evaluations, whatever the
            clip norm. So it refuses a server that counts on more clients than there are, and central placement.
        min_separation: minimum difference of the numbers of two rounds in which this client replies. It then refuses training
            without a minimum separation, or with a smaller one.
        max_participations: maximum number of this client's replies in a run; it then refuses training that may ask it more often.
        whole_run: whether one event must cover all rounds of a run, as for noise that is correlated over rounds. The noise
            multiplier is then that of the run; it refuses training in which it is that of each round.
        allow_metrics: whether training metrics may be sent if the server requests them; they are not private.
        allow_evaluation: whether to take part in private evaluations.
        min_evaluation_noise_multiplier: minimum noise multiplier that the server must promise for a private evaluation; None:
            `min_noise_multiplier`.
        min_evaluation_noise_std: minimum std of the noise that this client itself adds to its vector in a private evaluation,
            whose norm is at most 1; None: `min_noise_std` / `max_clip_norm`.

    Raises:
        ValueError: for a value out of its range, naming the field.

    Example:
        >>> from flower_dp.clients import ClientPolicy
        >>> from flower_dp.wire import Promise, ReleaseRequest
        >>> policy = ClientPolicy(max_clip_norm=1.0, min_noise_multiplier=0.8)
        >>> policy.check(ReleaseRequest(promise=Promise(clip_norm=1.0, noise_multiplier=0.5), placement="central"))
        Traceback (most recent call last):
            ...
        flower_dp.clients.refusal_messages.Declined: declined: noise_multiplier=0.5: this client's policy requires at least 0.8
    """

    max_clip_norm: float | None = None
    min_clip_norm: float | None = None
    min_noise_multiplier: float | None = None
    min_noise_std: float | None = None
    max_shares: int | None = None
    min_separation: int | None = None
    max_participations: int | None = None
    whole_run: bool = False
    allow_metrics: bool = False
    allow_evaluation: bool = True
    min_evaluation_noise_multiplier: float | None = None
    min_evaluation_noise_std: float | None = None

    def __post_init__(self) -> None:
        for name, limit in self._limits.items():
            if name in _WHOLE:
                checks.integer(name, limit, at_least=1)
            else:
                checks.number(name, limit, **({"above": 0} if "clip" in name else {"at_least": 0}))
        if self.max_clip_norm is not None and self.min_clip_norm is not None:
            checks.number("min_clip_norm", self.min_clip_norm, at_most=self.max_clip_norm)
        checks.flag("allow_metrics", self.allow_metrics)
        checks.flag("whole_run", self.whole_run)
        checks.flag("allow_evaluation", self.allow_evaluation)
        if self.min_noise_std and self.max_clip_norm is None:
            problem = "protects nothing while the server chooses the clip norm; set max_clip_norm too"
            raise ValueError(f"min_noise_std={self.min_noise_std:g}: {problem}")

    @property
    def least_evaluation_multiplier(self) -> float | None:
        """The minimum noise multiplier of an evaluation; None without a limit."""
        least = self.min_evaluation_noise_multiplier
        return self.min_noise_multiplier if least is None else least

    @property
    def least_evaluation_std(self) -> float | None:
        """The minimum std of the noise on the device in an evaluation; None without a limit."""
        if self.min_evaluation_noise_std is not None or self.min_noise_std is None:
            return self.min_evaluation_noise_std
        return self.min_noise_std / (self.max_clip_norm or 1.0)

    @property
    def _limits(self) -> dict[str, float]:
        """The limits that are set, among all fields that default to None."""
        names = [field.name for field in fields(self) if field.default is None]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def check(self, ask: ReleaseRequest) -> None:
        """Refuse training that this policy does not allow: its clip norm, or its noise in all or on the device.

        Raises:
            Declined: naming the limit and the requested value.
        """
        self._check_clip(ask)
        self._check_noise(ask, "training", "min_noise_multiplier", self.min_noise_multiplier, self._least_std(ask))
        self._check_separation(ask)

    def _check_separation(self, ask: ReleaseRequest) -> None:
        kept = ask.separation
        if self.whole_run and not (kept and kept.whole_run):
            raise Declined("whole_run=False: this client's policy requires noise of which one event covers all rounds")
        separation = 0 if kept is None else kept.min_separation
        _at_least(f"min_separation={separation}", separation, self.min_separation)
        most = math.inf if kept is None or kept.max_participations is None else kept.max_participations
        if self.max_participations is not None and most > self.max_participations:
            raise Declined(f"max_participations={most}: this client's policy allows at most {self.max_participations}")

    def _least_std(self, ask: ReleaseRequest) -> float | None:
        """Return the minimum std of this client's own noise in training, in proportion to the row under an adaptive clip norm."""
        if not self.min_noise_std or self.max_clip_norm is None or ask.indicator is None:
            return self.min_noise_std
        return self.min_noise_std * ask.promise.clip_norm / self.max_clip_norm * (1 - _ROUNDING)

    def check_local(self, ask: ReleaseRequest) -> None:
        """Refuse training under local DP that this policy does not allow; `check_own` compares the noise.

        Raises:
            Declined: naming the limit and the requested value.
        """
        self._check_clip(ask)
        self._check_separation(ask)
        if self.min_noise_std:
            raise Declined(f"min_noise_std={self.min_noise_std:g}: this client's noise follows from its own budget alone")

    def _check_clip(self, ask: ReleaseRequest) -> None:
        clip_norm = ask.promise.clip_norm if ask.indicator is None else ask.indicator.clip_norm
        _at_least(f"clip_norm={clip_norm:g}", clip_norm, self.min_clip_norm)
        if self.max_clip_norm is not None and not clip_norm <= self.max_clip_norm:
            raise Declined(f"clip_norm={clip_norm:g}: this client's policy allows at most {self.max_clip_norm:g}")

    def _check_noise(self, ask: ReleaseRequest, what: str, limit: str, multiplier: float | None, std: float | None) -> None:
        """Compare a request's noise, in all and on the device, with these limits; a policy with a limit must set one of them."""
        if self._limits and multiplier is None and std is None:
            raise Declined(f"{what}: this client's policy has limits, but none of its noise; set {limit} too")
        of = "" if ask.metrics is None else " of an evaluation"
        for name, value, least in (
            ("noise_multiplier", ask.promise.noise_multiplier, multiplier),
            ("noise_std", ask.noise_std, std),
        ):
            _at_least(f"{name}={value:g}{of}", value, least)
        if self.max_shares is not None:
            least = ask.promise.noise_scale / math.sqrt(self.max_shares)
            if not ask.noise_std >= least * (1 - _ROUNDING):
                shares = f"max_shares={self.max_shares} shares of the noise, each of {least:g} at least"
                raise Declined(f"noise_std={ask.noise_std:g}: this client's policy allows {shares}")

    def check_evaluation(self, ask: ReleaseRequest) -> None:
        """Refuse a private evaluation with less noise than this policy needs, in all or on the device.

        Raises:
            Declined: naming the limit and the requested value.
        """
        self._check_evaluates()
        multiplier, std = self.least_evaluation_multiplier, self.least_evaluation_std
        self._check_noise(ask, "an evaluation", "min_evaluation_noise_multiplier", multiplier, std)

    def check_own(self, release: Release) -> None:
        """Refuse to train under local DP if the noise of the client's own terms is below a limit.

        Raises:
            Declined: naming the limit.
        """
        _own_at_least("min_noise_multiplier", release.mechanism.noise_multiplier, self.min_noise_multiplier)

    def check_own_evaluation(self, release: Release) -> None:
        """Refuse an evaluation under local DP if the noise of the client's own terms is below a limit.

        Raises:
            Declined: naming the limit.
        """
        self._check_evaluates()
        multiplier, std = self.min_evaluation_noise_multiplier, self.min_evaluation_noise_std
        _own_at_least("min_evaluation_noise_multiplier", release.mechanism.noise_multiplier, multiplier)
        _own_at_least("min_evaluation_noise_std", release.noise_scale, std)

    def _check_evaluates(self) -> None:
        if not self.allow_evaluation:
            raise Declined("an evaluation: this client's policy has allow_evaluation=False")


def _at_least(what: str, value: float, least: float | None) -> None:
    if least is not None and not value >= least:
        raise Declined(f"{what}: this client's policy requires at least {least:g}")


def _own_at_least(limit: str, value: float, least: float | None) -> None:
    if least is not None and not value >= least:
        raise Declined(f"{limit}={least:g}: this client's own terms have less noise")
