"""The worst client: a quick upper bound of the largest epsilon of clients with terms of their own.

Accounting every client's ledger in every round takes far too long. So clients are put into a few groups. A group is accounted as
one client who costs no less than any of its members: the least noise, the largest sampling rate and the most replies among them.
Less noise never costs less, because more noise is post-processing. A larger rate never costs less, because a release at a smaller
rate is a mixture of it with a release without the unit. Besides, a client costs at most its budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from flower_dp.core import dp_events
from flower_dp.privacy import accounting
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.events import Relation, around, flatten_event, unwrap_sampling

# A group in which noise or rates differ by more than 2 % is halved, as long as there are fewer groups than this.
_MOST_GROUPS = 4
_NARROW = math.log(1.02)
# A group is accounted for up to a tenth more replies than it has, so that most rounds need no account.
_STEP = 1.1
# Grid of the accountant, as a part of the least budget, or of 1.
_GRID = 1e-3


class MaxClientEpsilon:
    """An upper bound of the largest cost of a client, from the number of replies of each.

    Args:
        terms: terms of every client, by name.
        relation: neighboring relation of the ledgers.
        delta: the delta at which the stated epsilon holds, also that of the budgets in the terms.
    """

    def __init__(self, terms: Mapping[str, ClientTerms], *, relation: Relation, delta: float) -> None:
        self._terms = dict(terms)
        kinds: dict[object, dict[str, dp_events.DpEvent]] = {}
        for name, client_terms in terms.items():
            release = flatten_event(client_terms.release.event(1))[0][0]
            kind = (type(release), type(unwrap_sampling(release)[0]), client_terms.num_releases)
            kinds.setdefault(kind, {})[name] = release
        groups = [group for releases in kinds.values() for group in _groups(releases)]
        self._groups = [_Group({name: terms[name] for name in group}, group, relation=relation, delta=delta) for group in groups]

    def epsilon(self, replies: Mapping[str, int], evaluations: Mapping[str, float]) -> float:
        """Return an upper bound of every client's epsilon; it never falls while the numbers grow.

        Args:
            replies: number of charged replies of each client.
            evaluations: pure epsilon of each client's other releases; a client that is not in it released nothing else.
        """
        largest = 0.0
        for group in self._groups:
            cost = group.epsilon(max(replies[name] for name in group.names))
            for name in group.names:
                terms, number = self._terms[name], replies[name]
                # Beyond its planned number of replies a budget bounds nothing.
                spent = min(cost, terms.epsilon if number <= terms.num_replies else math.inf) if number else 0.0
                largest = max(largest, spent + evaluations.get(name, 0.0))
        return largest


class _Group:
    """Clients whose releases are of one kind, and the cost of one who costs no less than any of them."""

    def __init__(
        self, terms: Mapping[str, ClientTerms], releases: Mapping[str, dp_events.DpEvent], *, relation: Relation, delta: float
    ) -> None:
        self.names = tuple(terms)
        self._relation, self._delta = relation, delta
        self._reply = accounting.repeated(_worst(list(releases.values())), next(iter(terms.values())).num_releases)
        least = min(client_terms.epsilon for client_terms in terms.values())
        self._grid = _GRID * min(1.0, least)
        self._accounted, self._cost = 0, 0.0

    def epsilon(self, replies: int) -> float:
        """Return an upper bound of what so many replies cost any of them; it never falls from call to call."""
        if replies > self._accounted:
            self._accounted = max(replies, math.floor(_STEP * self._accounted))
            event = accounting.repeated(self._reply, self._accounted)
            cost = accounting.epsilon(event, delta=self._delta, relation=self._relation, grid=self._grid)
            self._cost = max(self._cost, cost.epsilon)
        return self._cost


def _groups(releases: dict[str, dp_events.DpEvent]) -> list[dict[str, dp_events.DpEvent]]:
    """Return at most `_MOST_GROUPS` groups of releases of one kind, halving the widest group again and again."""
    groups = [releases]
    while len(groups) < _MOST_GROUPS:
        widest = max(groups, key=lambda group: max(_spans(group)))
        spans = _spans(widest)
        if max(spans) <= _NARROW:
            break
        axis = spans.index(max(spans))
        middle = min(_place(release)[axis] for release in widest.values()) + spans[axis] / 2
        groups.remove(widest)
        groups += [
            {name: release for name, release in widest.items() if (_place(release)[axis] > middle) is above}
            for above in (False, True)
        ]
    return groups


def _worst(releases: list[dp_events.DpEvent]) -> dp_events.DpEvent:
    """Return a release that costs no less than any of these, which are of one kind."""
    if isinstance(releases[0], dp_events.NonPrivateDpEvent):
        return releases[0]
    noise = min((unwrap_sampling(release)[0] for release in releases), key=lambda inner: float(inner.noise_multiplier))
    most = max(releases, key=lambda release: unwrap_sampling(release)[1])
    return around(most, noise)


def _spans(releases: dict[str, dp_events.DpEvent]) -> list[float]:
    return [max(column) - min(column) for column in zip(*map(_place, releases.values()), strict=True)]


def _place(release: dp_events.DpEvent) -> tuple[float, float]:
    """Return the logarithms of noise multiplier and sampling rate."""
    inner, rate = unwrap_sampling(release)
    return (0.0 if isinstance(inner, dp_events.NonPrivateDpEvent) else math.log(inner.noise_multiplier)), math.log(rate)
