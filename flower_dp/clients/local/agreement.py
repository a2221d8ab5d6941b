"""Comparison of a client's own terms with the server's: if they differ, the server might state too small an epsilon."""

import logging
from collections.abc import Callable, Mapping

from flower_dp.clients.account import Account
from flower_dp.clients.policy import ClientPolicy
from flower_dp.clients.reasons import SEE_LOG, Declined, contained
from flower_dp.clients.reply.pipeline import failure
from flower_dp.clients.reply.work import NOT_HOSTED
from flower_dp.core import checks
from flower_dp.privacy.client_terms import Terms
from flower_dp.privacy.device_store import Numbered, evaluation_account, owner_of
from flower_dp.wire import DECLINED, Instruction, OwnAsk, Promise, Refusal

log = logging.getLogger("flwr")

# The relative difference allowed between the noise multipliers that two machines compute from one budget.
_TOLERANCE = 1e-6
# Characters of a reason: of honest terms it has fewer.
_MOST_TOLD = 1000


def own_ask(instruction: Instruction, name: str) -> OwnAsk | None:
    """Return what an instruction asks of one client whose messages are private on its own terms; None if it is not asked.

    Raises:
        Declined: if the server asks for messages that are not private on their own.
    """
    ask = instruction.ask
    if ask.placement != "local":
        raise Declined(f"placement={ask.placement!r}: this client's messages are private on its own terms")
    return ask.own.get(name)


def agreed_terms(instruction: Instruction, name: str, terms_of: Callable[[], Terms], policy: ClientPolicy) -> Terms | Refusal:
    """Return one client's own terms if the server's are the same and its policy allows them, else why it does not reply.

    Args:
        instruction: the server's.
        name: the client.
        terms_of: makes the client's own terms.
        policy: the client's.

    Raises:
        Declined: if the server asks for messages that are not private on their own.
    """
    if (asked := own_ask(instruction, name)) is None:
        return NOT_HOSTED
    try:
        with contained():
            terms = terms_of()
        if instruction.ask.metrics is None:
            policy.check_own(terms.release)
        else:
            policy.check_own_evaluation(terms.release)
    except Exception as error:
        return failure(name, error, "this client's terms can't be made", code=DECLINED)
    reason = why_not(terms, instruction.ask.promise, asked)
    return Refusal(reason=reason) if reason else terms


def charged(account: Account, due: Mapping[str, Terms], instruction: Instruction) -> dict[str, Refusal]:
    """Charge one reply, or one evaluation, to each client; return why some can't pay, by name. They must not reply."""
    numbered = {name: Numbered(run=one.run, number=one.number) for name, one in instruction.ask.own.items()}
    if instruction.ask.metrics is not None:
        due = {evaluation_account(name): terms for name, terms in due.items()}
        numbered = {evaluation_account(name): number for name, number in numbered.items()}
    return {owner_of(name): refusal for name, refusal in account.charge(due, numbered).items()}


def why_not(terms: Terms, promise: Promise, asked: OwnAsk) -> str | None:
    """Return why a client must not reply, in a text that the server may see; None if the client may reply.

    The text has the server's values alone. The client's own may follow from how many records it has; the node's own log has them.

    Args:
        terms: the client's own.
        promise: the server's clip norm.
        asked: what the server takes the terms to be. It charges by their noise multiplier; the client's own may be larger.
    """
    clip_norm, kind, noise_multiplier = promise.clip_norm, asked.terms, asked.noise_multiplier
    own = terms.release.mechanism.noise_multiplier
    if clip_norm != terms.release.clip_norm:
        return _told(f"clip_norm={clip_norm:g}: is not this client's own", f"{terms.release.clip_norm:g}")
    if kind != terms.kind:
        return _told(f"the server's terms ({kind}) are not this client's own", terms.kind)
    if not own >= noise_multiplier * (1 - _TOLERANCE):
        return _told(f"noise_multiplier={noise_multiplier:g}: by this client's own budget it is less", f"{own:g}")
    return None


def _told(reason: str, own: str) -> str:
    line = checks.one_line(reason, most=_MOST_TOLD)  # it has the server's text
    log.warning("no reply: %s; its own: %s", line, own)
    return f"{line}; {SEE_LOG}"
