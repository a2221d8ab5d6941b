"""A client's account of its participations in a run whose clients keep a minimum separation.

The server, or its clients together, add the noise; the account protects against a server that asks too early or too often, by
mistake or from an older copy of its state. It believes the numbers of the rounds, which a server that lies can choose.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Context

from flower_dp.clients.account import AccountStore, account_of, refuse_ledger
from flower_dp.clients.refusal_messages import Declined
from flower_dp.core import checks, dp_events
from flower_dp.core.sampling import FullSampling
from flower_dp.privacy.client_terms import ChargeRefusal
from flower_dp.privacy.device_store import ReplyNumber, owner_of, participation_account
from flower_dp.privacy.mechanisms import Gaussian
from flower_dp.privacy.release import Release
from flower_dp.wire import Instruction, Promise, Refusal, Separation


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipationTerms:
    """The terms of one client in one run, as the server's first request told them; they can't change later in the run.

    Attributes:
        method: name of the method.
        promise: clip norm and noise multiplier of the whole release.
        separation: separation that the client keeps.
    """

    method: str
    promise: Promise
    separation: Separation

    @property
    def num_replies(self) -> int:
        """The largest number of replies of the run."""
        return self.separation.max_participations or checks.MOST_COUNT

    @property
    def release(self) -> Release:
        """One release, as the server promises it; it costs the most under add-or-remove-one if clients are not replaced."""
        return Release(
            description="the noised sum of clipped updates, by the server's word",
            visible_to="everyone who sees global models",
            unit="client",
            relation="add-or-remove-one",
            clip_norm=self.promise.clip_norm,
            mechanism=Gaussian(noise_multiplier=self.promise.noise_multiplier),
            sampler=FullSampling(),
            num_units=1,
        )

    def event_of(self, number: int) -> dp_events.DpEvent:
        """Return the event of reply `number`; correlated noise costs the whole run with the first one."""
        charged = number == 1 or not self.separation.whole_run or not self.promise.noise_multiplier
        return self.release.event(1) if charged else dp_events.NoOpDpEvent()

    @property
    def text(self) -> str:
        """Terms as one line; different terms have different lines."""
        kept, noise = self.separation, self.promise.noise_multiplier
        apart = f"min_separation={kept.min_separation}, {'of the whole run' if kept.whole_run else 'each'}"
        return f"{self.num_replies} replies to {self.method}, {apart}, noise_multiplier={noise!r}"

    def refusal_reason(self, replies: int, opened: str | None) -> ChargeRefusal | None:
        """Return the reason why a client can't reply again; None if it can."""
        if opened not in (None, self.text):
            public = "the server's terms of this run have changed"
            return ChargeRefusal(public=public, own=f"{public}: they were {opened}, and are {self.text}")
        if replies >= self.num_replies:
            public = f"max_participations={self.num_replies}: all of them were counted"
            return ChargeRefusal(public=public, own=public)
        return None


def refusals(instruction: Instruction, names: Sequence[str], context: Context | None) -> dict[str, Refusal]:
    """Count a participation of each client; return the refusals of those that may not take part now, before any work.

    Args:
        instruction: instruction that was checked.
        names: requested clients of this node.
        context: the node's context, with its state and the settings of the device's owner.

    Raises:
        Declined: if the account can't be used, or the device's owner names a ledger and the request needs none.
    """
    separation = instruction.ask.separation
    if separation is None:
        if context is not None:
            refuse_ledger(context)
        return {}
    if not re.fullmatch("[0-9a-f]+", separation.run) or len(separation.run) > checks.MOST_ID:
        run = checks.one_line(separation.run, most=40)
        raise Declined(f"run={run!r}: must be the id of a run, by which participations count")
    account: AccountStore = account_of(None, names, context)
    terms = ParticipationTerms(method=instruction.method, promise=instruction.ask.promise, separation=separation)
    number = ReplyNumber(run=separation.run, number=separation.number, separation=separation.min_separation)
    accounts = [participation_account(name, separation.run) for name in names]
    refused = account.charge(dict.fromkeys(accounts, terms), dict.fromkeys(accounts, number))
    return {owner_of(name): refusal for name, refusal in refused.items()}
