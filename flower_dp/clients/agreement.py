"""Comparison of a client's own terms with the server's: if they differ, the server might state too small an epsilon."""

from flower_dp.privacy.client_terms import Terms

# The relative difference allowed between the noise multipliers that two machines compute from one budget.
_TOLERANCE = 1e-6


def why_not(terms: Terms, *, clip_norm: float, kind: str, noise_multiplier: float) -> str | None:
    """Return why a client must not reply, in a text that the server may see; None if the client may reply.

    Args:
        terms: the client's own.
        clip_norm: the server's.
        kind: the server's `Terms.kind` of this client.
        noise_multiplier: by which the server charges; the client's own may be larger.
    """
    own = terms.release.mechanism.noise_multiplier
    if clip_norm != terms.release.clip_norm:
        return f"clip_norm={clip_norm:g}: this client's own is {terms.release.clip_norm:g}"
    if kind != terms.kind:
        return f"the server's terms ({kind}) are not this client's own ({terms.kind})"
    if own < noise_multiplier * (1 - _TOLERANCE):
        return f"noise_multiplier={noise_multiplier:g}: by this client's own budget it is {own:g}"
    return None
