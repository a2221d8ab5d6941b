"""The privacy statement of FedSGD-DPC: the noise of a weighted mean gradient, and the papers' two formulas."""

import math
from typing import TYPE_CHECKING

from flower_dp.privacy.fedsgd_dpc import gaussian_noise_variance
from flower_dp.privacy.statement import PaperEpsilon, PrivacyStatement
from flower_dp.strategies.run_state import RunFacts
from flower_dp.strategies.statements.local import counts_sampling, least_and_largest, local_statement, most_replies

if TYPE_CHECKING:
    from flower_dp.strategies.fedsgd_dpc import FedSGDDPCRules

_FORMULAS = {
    "laplace": "pure epsilons of all replies added up, Zhou et al. Theorem 1",
    "gaussian": "c2 C sqrt(R log(1/delta)) / (n std), Zhou et al. Theorem 2, eq. 5",
}


def statement_of(rules: "FedSGDDPCRules", run: RunFacts) -> PrivacyStatement:
    """Return the statement: the worst client, and the distribution over clients."""
    books = rules.books
    batch = "all records" if rules.sampling_rate == 1 else f"every record with probability {rules.sampling_rate:g}"
    scale = "noise_scale_of_a_mean_gradient"
    return local_statement(
        rules.title,
        books,
        run,
        message_std=_message_std(rules),
        noise={
            "clip_norm": rules.clip_norm,
            **least_and_largest(books, scale, lambda release: release.noise_scale / release.expected_cohort),
        },
        paper=_paper(rules, run),
        sampling=f"{rules.training.sampling}: {most_replies(books)}; {batch} in each",
        assumptions=("which records are in a batch is known to the client alone",) if counts_sampling(books) else (),
    )


def _message_std(rules: "FedSGDDPCRules") -> float:
    """The least std of the noise on a number that a client sends: on its weighted mean gradient."""
    releases = {name: terms.release for name, terms in rules.books.terms.items()}
    stds = [rules.weight(name) * release.noise_std / release.expected_cohort for name, release in releases.items()]
    return min(stds, default=0.0)


def _paper(rules: "FedSGDDPCRules", run: RunFacts) -> PaperEpsilon | None:
    """The paper's epsilon, for the noise and the replies of the run, of the client whom it costs most."""
    values = []
    for name, ledger in rules.books.ledgers.items():
        release, replies = rules.books.terms[name].release, ledger.num_charges
        scale, num_records = release.noise_scale / release.expected_cohort, rules.books.num_records[name]
        if not scale:
            return None
        if not replies:
            continue
        if rules.mechanism == "laplace":
            values.append(2 * rules.clip_norm * replies / (num_records * scale))
        elif rules.noise_constant is not None:
            variance = gaussian_noise_variance(
                rules.clip_norm, num_records, 1.0, replies, delta=rules.delta, noise_constant=rules.noise_constant
            )
            values.append(math.sqrt(variance) / scale)
    if not values:
        return None
    if run.seeded_noise:
        reason = "noise came from a fixed seed"
    elif rules.mechanism == "laplace":
        reason = "for replace-one, and with the true number of replies instead of the expected one"
    else:
        reason = f"c2 = {rules.noise_constant:g} was given by the user; the constant of the proof has no published value"
    return PaperEpsilon(
        epsilon=max(values),
        formula=_FORMULAS[rules.mechanism],
        valid=rules.mechanism == "laplace" and not run.seeded_noise,
        reason=reason,
    )
