"""What is asked of clients whose messages are private one by one, each by its own terms."""

from collections.abc import Callable, Mapping

from flower_dp.core.metric_bounds import MetricBounds
from flower_dp.privacy.client_terms import Terms
from flower_dp.wire import Ask, OwnAsk, Promise


def ask_of(
    terms: Mapping[str, Terms], *, clip_norm: float, weight_of: Callable[[str], float], metrics: MetricBounds | None = None
) -> Ask:
    """Return what is asked of some clients.

    Args:
        terms: of each client, by its name.
        clip_norm: of their releases.
        weight_of: what a client's row counts in the sum.
        metrics: of an evaluation; None in training.
    """
    own = {
        name: OwnAsk(weight=weight_of(name), terms=one.kind, noise_multiplier=one.release.mechanism.noise_multiplier)
        for name, one in terms.items()
    }
    # Of all of them together; every client compares what is asked of it alone with its own terms.
    least = min((one.noise_multiplier for one in own.values()), default=0.0)
    return Ask(promise=Promise(clip_norm=clip_norm, noise_multiplier=least), placement="local", own=own, metrics=metrics)
