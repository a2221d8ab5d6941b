"""The privacy statement of DP-PASGD: exact composition of all noised steps, and the paper's epsilon for the same noise."""

from dataclasses import replace
from typing import TYPE_CHECKING

from flower_dp.privacy.dp_pasgd import paper_epsilon
from flower_dp.privacy.statement import PaperEpsilon, PrivacyStatement
from flower_dp.strategies.run_state import RunFacts
from flower_dp.strategies.statements.local import counts_sampling, least_and_largest, local_statement

if TYPE_CHECKING:
    from flower_dp.strategies.dp_pasgd import DPPASGDRules

_FORMULA = "rho + 2 sqrt(rho log(1/delta)), rho = 2 K G^2 / (X_m^2 sigma_m^2), Hu et al. eq. 9"
_BATCHES = {
    "fixed-size": "a batch of fixed size drawn anew in every step, accounted as if every record were in all of them",
    "poisson": "each record in the batch of every step independently with probability batch_size / num_records",
}


def statement_of(rules: "DPPASGDRules", run: RunFacts) -> PrivacyStatement:
    """Return the statement: the worst client, and the distribution over clients."""
    books, resources = rules.books, rules.resources
    if resources.budget.has_costs and books.num_rounds:
        run = replace(run, incidents=(*run.incidents, resources.line()))
    assumptions = [
        "the model that a client sends is computed from its noised steps alone, so it costs what the steps cost together"
    ]
    if counts_sampling(books):
        assumptions.append("which records are in a batch is known to the client alone")
    if chosen := rules.own.in_words(rules.best_by):
        assumptions.append(f"{chosen} on data that are taken as public: choosing by public data costs nothing")
    scale = "noise_std_of_a_mean_gradient"
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
        sampling=f"all clients of {rules.num_clients} in every round, at most {rules.num_steps} local steps of one client, "
        f"{rules.steps.num_local_steps} a round; {_BATCHES[rules.batch_sampling]}",
        assumptions=tuple(assumptions),
    )


def _message_std(rules: "DPPASGDRules") -> float:
    """The least std of the noise on a number that a device sends: on the change of a weight in all steps of a round."""
    stds = [terms.release.noise_std / terms.release.expected_cohort for terms in rules.books.terms.values()]
    least = min(stds, default=0.0)
    return min(rules.steps.noise_std(1 + done, noise=least) for done in range(max(1, rules.books.num_rounds)))


def _paper(rules: "DPPASGDRules", run: RunFacts) -> PaperEpsilon | None:
    """The paper's epsilon, for the noise and the steps of the run, of the client whom it costs most."""
    values = []
    for name, ledger in rules.books.ledgers.items():
        terms = rules.books.terms[name]
        if not terms.release.noise_scale:
            return None
        if ledger.num_charges:
            # As a batch of one record: noise and sensitivity of the sum have the ratio of those of the mean.
            spent = paper_epsilon(
                noise_std=terms.release.noise_scale,
                delta=rules.delta,
                num_steps=ledger.num_charges * terms.num_releases,
                clip_norm=rules.clip_norm,
                batch_size=1,
            )
            values.append(spent)
    if not values:
        return None
    held = "zero-concentrated differential privacy, for the noise of the run, without amplification"
    reason = "noise came from a fixed seed" if run.seeded_noise else held
    return PaperEpsilon(epsilon=max(values), formula=_FORMULA, valid=not run.seeded_noise, reason=reason)
