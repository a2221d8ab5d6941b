"""Comparison of a client's own terms with the server's: if they differ, the server might state too small an epsilon."""

import logging

from flower_dp.clients.reasons import SEE_LOG
from flower_dp.privacy.client_terms import Terms

log = logging.getLogger("flwr")

# The relative difference allowed between the noise multipliers that two machines compute from one budget.
_TOLERANCE = 1e-6


def why_not(terms: Terms, *, clip_norm: float, kind: str, noise_multiplier: float) -> str | None:
    """Return why a client must not reply, in a text that the server may see; None if the client may reply.

    The text has the server's values alone. The client's own may follow from how many records it has; the node's own log has them.

    Args:
        terms: the client's own.
        clip_norm: the server's.
        kind: the server's `Terms.kind` of this client.
        noise_multiplier: by which the server charges; the client's own may be larger.
    """
    own = terms.release.mechanism.noise_multiplier
    if clip_norm != terms.release.clip_norm:
        return _told(f"clip_norm={clip_norm:g}: is not this client's own", f"{terms.release.clip_norm:g}")
    if kind != terms.kind:
        return _told(f"the server's terms ({kind}) are not this client's own", terms.kind)
    if not own >= noise_multiplier * (1 - _TOLERANCE):
        return _told(f"noise_multiplier={noise_multiplier:g}: by this client's own budget it is less", f"{own:g}")
    return None


def _told(reason: str, own: str) -> str:
    log.warning("no reply: %s; its own: %s", reason, own)
    return f"{reason}; {SEE_LOG}"
