"""What statements say beside epsilon: noise of messages, adversaries once each, assumptions that were relied on, what is left out."""

import math
from dataclasses import replace

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies import DPPASGD, DPFedAvg, DPFedPAQ, DPFedSAM, FedSGDDPC, FedSMP, NbAFL, PrivateEvaluation, Scaffold
from flower_dp.strategies.not_covered import OTHER_RUNS
from flower_dp.strategies.releases.replies import MissingReplies
from flower_dp.strategies.run_state import RunFacts
from tests.charges import charge

NAMES = ("c0", "c1", "c2", "c3")
MANY = tuple(f"c{index}" for index in range(400))
SIZES = {"c0": 8, "c1": 16, "c2": 24, "c3": 80}
LEVEL = {"clip_norm": 0.5, "noise_multiplier": 4.0, "num_clients": 4, "delta": 1e-3}
STEPS = FedPAQSteps(learning_rate=0.5, num_local_steps=2, batch_size=4, clip_norm=1.0, sensitivity="per-step")
PAQ = {"steps": STEPS, "sampling": FullSampling(), "num_clients": 4, "epsilon": 2.0, "delta": 1e-3, "num_replies": 9}
SGD = {"num_clients": 4, "cohort_size": 2, "clip_norm": 0.5, "epsilon": 2.0, "learning_rate": 0.1, "num_replies": 9}
PASGD = {"num_clients": 4, "clip_norm": 0.5, "epsilon": 2.0, "delta": 1e-3, "num_steps": 18, "num_local_steps": 3}
METHODS = {
    "dp-fedavg": lambda: DPFedAvg(**LEVEL, sampling=FullSampling()),
    "dp-fedsam": lambda: DPFedSAM(**LEVEL, sampling=FullSampling()),
    "fed-smp": lambda: FedSMP(**LEVEL, sampling=FullSampling(), keep_ratio=0.5),
    "fedsgd-dpc": lambda: FedSGDDPC(**SGD, mechanism="laplace", num_records=SIZES),
    "nbafl": lambda: NbAFL(num_clients=4, num_records=SIZES, clip_norm=1.0, paper_epsilon=2.0, delta=0.01, uplink_exposures=9),
    "dp-pasgd": lambda: DPPASGD(**PASGD, batch_size=4, learning_rate=0.25),
    "dp-fedpaq": lambda: DPFedPAQ(**PAQ, num_records=8),
    "scaffold": lambda: Scaffold(**PAQ, num_records=8),
}


def stated(strategy, rounds=3, names=NAMES):
    """The statement after some charged rounds of all clients."""
    strategy.plan(rounds, names)
    for _ in range(rounds):
        charge(strategy, names)
    return strategy.statement


def stated_with(strategy, **changes):
    """The statement of its charges, with other facts on the run."""
    facts = RunFacts(seeded_noise=False, missing=MissingReplies(), incidents=(), report_client_metrics=False)
    return strategy.rules.statement(strategy.state, replace(facts, **changes))


@pytest.mark.parametrize("method", METHODS)
def test_every_statement_names_other_runs_and_all_else_that_it_leaves_out(method):
    own, rest = stated(METHODS[method]()).not_covered
    assert own.startswith(OTHER_RUNS)
    assert ("ledger file" in own) == (method not in ("dp-fedavg", "dp-fedsam", "fed-smp"))
    assert rest.startswith("Everything else computed from client data: the choice of settings, timing, logs")


# Assumptions


def relies(statement, arguments):
    return [line for line in statement.assumptions if arguments in line]


BATCH = "Only the client knows which records are in a batch."
CHOICE = "Only the client knows which of its records it uses."
GAUSSIAN = SGD | {"mechanism": "gaussian", "delta": 1e-3, "num_records": SIZES}
POISSON = PASGD | {"epsilon": 0.3, "learning_rate": 0.25, "batch_sampling": "poisson", "num_records": 80}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "words", "relied"),
    [
        (lambda: FedSGDDPC(**GAUSSIAN | {"epsilon": 0.3}, sampling_rate=0.05), BATCH, True),
        (lambda: FedSGDDPC(**GAUSSIAN, sampling_rate=1.0), BATCH, False),
        (lambda: DPPASGD(**POISSON, batch_size=4), BATCH, True),
        (lambda: DPPASGD(**POISSON, batch_size=80), BATCH, False),
        (lambda: DPFedPAQ(**PAQ | {"epsilon": 0.5}, num_records=16), CHOICE, True),
        (lambda: DPFedPAQ(**PAQ | {"epsilon": 0.5}, num_records=8), CHOICE, False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else "",
)
def test_only_a_cost_that_counts_sampling_relies_on_it(make, words, relied):
    statement = stated(make(), rounds=6)
    assert bool(relies(statement, words)) == relied
    assert (statement.accountant != "gaussian-exact") == relied


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "relied"),
    [
        (PoissonSampling(sampling_rate=0.1), True),
        (FixedSizeSampling(cohort_size=40), True),
        (RoundRobinSampling(cohort_size=40), False),
        (FullSampling(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_secret_cohort_is_assumed_where_a_cost_counts_it(sampling, relied):
    arguments = LEVEL | {"num_clients": 400, "delta": 1e-4}
    relation = "replace-one" if isinstance(sampling, FixedSizeSampling) else "add-or-remove-one"
    strategy = DPFedAvg(**arguments, sampling=sampling, relation=relation)
    statement = stated(strategy, names=MANY)
    assert bool(relies(statement, "No outsider or participant learns a round's cohort")) == relied
    fixed = isinstance(sampling, FixedSizeSampling)
    unaccounted = "NOT ACCOUNTED FOR in training: epsilon uses the sampling rate 40/400. Against a client that knows it was not "
    assert (
        bool(
            relies(
                statement,
                f"{unaccounted}selected, the rate is 40/399 in that round; against a node with k clients, none selected, 40/(400 - k).",
            )
        )
        == fixed
    )
    outsiders = next(one for one in statement.adversaries if one.name == "outsiders")
    assert outsiders.view.endswith("; not which clients took part") == fixed
    assert outsiders.view.endswith(", and who took part") == (not relied)


CENTRAL = "The server is trusted: it sees single updates and adds the noise."
SHARES = (
    "Every replying client adds its noise share. Single messages are not private: only the aggregator receives them, and it is "
    "trusted not to look at single ones."
)
TOPPED = "The server is trusted to add every noise share that a round's sum lacks."
APART = "Clients do not combine what they know of their noise shares; nor does a node that hosts several clients."
NONE = "No noise is added to updates: training is not private."


@pytest.mark.parametrize(
    ("arguments", "assumed"),
    [
        ({"placement": "central"}, (CENTRAL,)),
        ({}, (SHARES, TOPPED, APART)),
        ({"server_completes_noise": False}, (SHARES, APART)),
        ({"placement": "central", "noise_multiplier": 0.0}, (NONE,)),
        ({"noise_multiplier": 0.0}, (NONE,)),
    ],
    ids=["central", "distributed", "nobody adds missing shares", "central, no noise", "distributed, no noise"],
)
def test_who_is_trusted_with_the_noise_is_said(arguments, assumed):
    statement = stated(DPFedSAM(**LEVEL | arguments, sampling=FullSampling()))
    assert (
        statement.assumptions[0]
        == "Every client clips what it sends as instructed. Whether it replies does not depend on its data."
    )
    assert tuple(line for line in statement.assumptions if line in (CENTRAL, SHARES, TOPPED, APART, NONE)) == assumed


def test_a_release_that_tells_the_cohort_says_that_sampling_lowers_no_cost():
    sampled = LEVEL | {"num_clients": 400, "delta": 1e-4}
    arguments = "Adversaries may know who takes part, so epsilon claims no amplification by sampling."
    strategy = DPFedSAM(**sampled, sampling=PoissonSampling(sampling_rate=0.1), server_completes_noise=False)
    strategy.plan(3)
    assert relies(strategy.statement, arguments + " Neighboring runs differ in one client, whose update is replaced by zero.")
    assert not relies(stated(METHODS["dp-fedsam"]()), arguments)
    fixed = DPFedSAM(**sampled, sampling=FixedSizeSampling(cohort_size=40), server_completes_noise=False)
    fixed.plan(3)
    assert relies(fixed.statement, arguments + " Neighboring runs differ in one client, whose update is replaced by any other.")


def test_a_statement_separates_training_that_tells_its_cohort_from_evaluations_that_do_not():
    """Compressed messages rest on each client's own share; metrics on the sum of shares, whose assumptions must be there too."""
    evaluation = PrivateEvaluation(sampling=PoissonSampling(sampling_rate=0.1), noise_multiplier=4.0, metrics={"accuracy": 1.0})
    sampled = LEVEL | {"num_clients": 400, "delta": 1e-4}
    strategy = DPFedSAM(**sampled, sampling=PoissonSampling(sampling_rate=0.1), keep_ratio=0.5, evaluation=evaluation)
    strategy.plan(3)
    statement = strategy.statement
    assert relies(statement, "In training, only a client's own noise share protects it: its message is top-k")
    assert [line for line in statement.assumptions if line.startswith("In evaluations: ")] == [
        f"In evaluations: {line}" for line in (SHARES, TOPPED, APART)
    ]
    assert relies(
        statement, "Adversaries may know who takes part in training, so its epsilon claims no amplification by sampling."
    )
    assert relies(statement, "No outsider or participant learns who evaluates or how many do")
    assert statement.unlisted_incidents.startswith("missing or rejected replies to evaluations and reports of single devices")


@pytest.mark.parametrize(
    ("sampling", "evaluates", "unlisted"),
    [
        (FullSampling(), None, ""),
        (PoissonSampling(sampling_rate=0.1), None, "missing or rejected updates and reports of single devices"),
        (FullSampling(), FullSampling(), "missing or rejected replies to evaluations."),
        (
            FullSampling(),
            PoissonSampling(sampling_rate=0.1),
            "missing or rejected replies to evaluations and reports of single devices",
        ),
    ],
)
def test_no_incident_means_none_only_where_all_are_listed(sampling, evaluates, unlisted):
    evaluation = evaluates and PrivateEvaluation(sampling=evaluates, noise_multiplier=4.0, metrics={"accuracy": 1.0})
    strategy = DPFedAvg(**LEVEL | {"num_clients": 400, "delta": 1e-4}, sampling=sampling, evaluation=evaluation)
    statement = strategy.statement
    assert statement.unlisted_incidents.startswith(unlisted)
    assert bool(statement.unlisted_incidents) == bool(unlisted)
    assert ("INCIDENTS      None. Not listed: " in str(statement)) == bool(unlisted)


def test_a_local_statement_says_what_is_public_and_whom_nobody_can_check():
    for method in ("fedsgd-dpc", "nbafl", "dp-pasgd", "dp-fedpaq", "scaffold"):
        first, second = stated(METHODS[method]()).assumptions[:2]
        assert first.startswith(
            "Every client clips and adds its noise itself, by its own budget. A client that does not loses its own"
        )
        assert second.startswith(
            "Data sizes, budgets, cohorts and the names of replying clients are public. Whether a client replies"
        )
    assert relies(stated(METHODS["nbafl"]()), "other clients add their noise and keep it secret; the server adds its own")


@pytest.mark.parametrize("method", METHODS)
def test_what_a_run_went_through_is_said(method):
    strategy = METHODS[method]()
    stated(strategy)
    incidents = ("ended before round 4: no reason",)
    strategy._session.update_state(missing=MissingReplies(no_reply=2, rejected=1), incidents=incidents)
    statement = strategy.statement
    assert "ended before round 4: no reason" in statement.incidents
    missed = ("3 requested updates did not count: ", "3 requested replies did not count: ")
    assert any(line.startswith(missed) for line in statement.incidents)
    if method not in ("dp-fedavg", "dp-fedsam", "fed-smp"):
        strategy._session.update_state(releases={strategy.rules.training.name: 5})
        assert "5 times a client was skipped because its budget was spent" in strategy.statement.incidents


@pytest.mark.parametrize("method", METHODS)
def test_metrics_without_noise_are_named(method):
    strategy = METHODS[method]()
    stated(strategy)

    def told(**changes):
        return [line for line in stated_with(strategy, **changes).not_covered if line.startswith("CLIENT METRICS")]

    assert not told()
    assert "CLIENT METRICS: clients sent training metrics without noise." in told(report_client_metrics=True)
    assert any("configure_evaluate requests metrics without noise" in line for line in told(custom_evaluation=True))


@pytest.mark.parametrize("method", METHODS)
def test_no_number_of_a_paper_is_valid_with_noise_from_a_seed(method):
    strategy = METHODS[method]()
    stated(strategy)
    statement = stated_with(strategy, seeded_noise=True)
    papers = [statement.paper_epsilon, *(one.paper_epsilon for one in statement.adversaries)]
    assert not any(paper.valid for paper in papers if paper is not None)
    assert all("seed" in paper.reason for paper in papers if paper is not None)
    assert statement.epsilon == math.inf
    assert not statement.adversaries
    assert any("FIXED SEED" in line for line in statement.assumptions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"sampling": FixedSizeSampling(cohort_size=40), "relation": "replace-one"}, "assumes Poisson sampling"),
        ({"sampling": FullSampling(), "relation": "replace-one"}, "it holds for add-or-remove-one"),
        (
            {"sampling": PoissonSampling(sampling_rate=0.1), "server_completes_noise": False},
            "the number of noise shares in a sum reveals who takes part",
        ),
        ({"sampling": FullSampling(), "keep_ratio": 0.5}, "top-k of each client's own noised update is not post-processing"),
        ({"sampling": FullSampling()}, None),
    ],
)
def test_the_papers_epsilon_is_valid_where_its_assumptions_hold(arguments, fault):
    strategy = DPFedSAM(**LEVEL | {"num_clients": 400, "delta": 1e-4}, **arguments)
    paper = stated(strategy, 2, MANY).paper_epsilon
    assert paper.valid == (fault is None)
    assert fault is None or fault in paper.reason
    rate = arguments["sampling"].expected_cohort_size(400) / 400
    event = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(4.0)), 2)
    assert paper.epsilon == pytest.approx(accounting.rdp_epsilon(event, delta=1e-4, relation="add-or-remove-one"))


def test_one_client_without_noise_makes_a_run_not_private():
    budgets = dict(zip(NAMES, (0.5, math.inf, 1.0, 0.1), strict=True))
    statement = stated(FedSGDDPC(**SGD | {"epsilon": budgets}, mechanism="laplace", num_records=8))
    assert not statement.private
    assert (statement.clients, statement.adversaries, statement.epsilon_by_release, statement.protected_against) == (
        None,
        (),
        {},
        "nobody",
    )
    waiting = FedSGDDPC(**SGD | {"epsilon": budgets}, mechanism="laplace", num_records=8)
    waiting.plan(3, NAMES)
    charge(waiting, ("c0", "c2"))
    assert not waiting.statement.private  # before the one without noise has sent anything
    pasgd = stated(DPPASGD(**PASGD | {"epsilon": budgets}, batch_size=4, learning_rate=0.25))
    assert (pasgd.private, pasgd.paper_epsilon) == (False, None)


@pytest.mark.parametrize("sampling", [FullSampling(), FixedSizeSampling(cohort_size=2)], ids=["full", "fixed-size"])
def test_the_stated_noise_of_a_sum_is_z_c_and_that_of_the_mean_is_over_the_expected_cohort(sampling):
    words = LEVEL | {"clip_norm": 0.25, "sampling": sampling}
    cohort = 4 if isinstance(sampling, FullSampling) else 2
    for strategy in (DPFedAvg(**words), DPFedSAM(**words, placement="distributed")):
        noise = strategy.statement.noise
        assert (noise["clip_norm"], noise["noise_multiplier"]) == (0.25, 4.0)
        assert noise["noise_std_of_the_sum"] == pytest.approx(4.0 * 0.25)
        assert noise["noise_std_of_the_mean"] == pytest.approx(4.0 * 0.25 / cohort)
