"""Statements of generated runs with gaps, against closed forms: every epsilon, every noise std, and what the run says of itself."""

import math
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_dp import strategies as methods
from flower_dp.clients import DPClient, DPFedPAQRecipe, DPPASGDRecipe, FedSGDDPCRecipe, LocalDPClient, NbAFLRecipe, Training
from flower_dp.core import dp_events
from flower_dp.core.sampling import FixedSizeSampling, FullSampling, PoissonSampling, RoundRobinSampling
from flower_dp.privacy import accounting
from flower_dp.privacy.dp_fedpaq import FedPAQSteps
from flower_dp.strategies import writer
from flower_dp.strategies.forecast import forecast
from tests.closed_forms import gaussian_epsilon, gaussian_multiplier
from tests.gaps import ROUNDS, GappyRun, Gaps, gaps, quickly, run

ADD, REPLACE = "add-or-remove-one", "replace-one"
TRAINING = Training(learning_rate=0.1, batch_size=4)


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    """A checkpoint after every round, however short."""
    monkeypatch.setattr(writer, "_SHARE", 1.0)


def by_name(statement: Any) -> dict[str, Any]:
    return {one.name: one for one in statement.adversaries}


# One noised sum


@st.composite
def sum_cases(draw: Any) -> dict[str, Any]:
    there = draw(gaps())
    many = len(there.sizes)
    relation = draw(st.sampled_from([ADD, REPLACE]))
    samplers = [FullSampling(), PoissonSampling(sampling_rate=0.6), RoundRobinSampling(cohort_size=many - 1)]
    samplers += [FixedSizeSampling(cohort_size=many - 1)] if relation == REPLACE else []
    # Where shares depend on the cohort, more can go wrong.
    placement = draw(st.sampled_from(["central", "trusted", "lossy", "untrusted", "untrusted"]))
    samplers += [samplers[1]] * 2 if placement == "untrusted" else []
    every = draw(st.integers(0, 2))
    return {
        "gaps": there,
        "relation": relation,
        "sampling": draw(st.sampled_from(samplers)),
        "evaluating": draw(st.sampled_from(samplers)),
        "placement": placement,
        "ratio": draw(st.sampled_from([0.5, 1.0])),
        "every": every,
        "clip_norm": draw(st.sampled_from([0.3, 2.0])),
        "multipliers": draw(st.tuples(st.sampled_from([2.0, 4.0]), st.sampled_from([3.0, 8.0]))),
        "delta": draw(st.sampled_from([1e-3, 1 / many, 0.1])),
    }


def sum_event(case: dict[str, Any], sampling: Any, multiplier: float, number: int, *, lossy: bool) -> dp_events.DpEvent | None:
    """What the release of a number costs a client that is in the draw, with this noise; None for nothing."""
    many, one = len(case["gaps"].sizes), dp_events.GaussianDpEvent(multiplier)
    if isinstance(sampling, RoundRobinSampling):
        turns = [math.ceil(rounds * (many - 1) / many) for rounds in (number - 1, number)]
        return one if turns[1] > turns[0] else None
    if lossy or case["placement"] == "untrusted" or isinstance(sampling, FullSampling):
        return one  # adversaries know who takes part
    if isinstance(sampling, PoissonSampling):
        return dp_events.PoissonSampledDpEvent(0.6, one)
    return dp_events.SampledWithoutReplacementDpEvent(many, many - 1, one)


def shares_of(case: dict[str, Any], sampling: Any, drawn: int, *, lossy: bool) -> int:
    """In how many shares the noise of a sum is drawn where clients draw it."""
    many = len(case["gaps"].sizes)
    most = many if isinstance(sampling, FullSampling | PoissonSampling) else many - 1
    if lossy:
        return math.ceil(0.6 * many if isinstance(sampling, PoissonSampling) else most)
    if case["placement"] == "untrusted":
        return max(1, math.ceil(case["ratio"] * (drawn if isinstance(sampling, PoissonSampling) else most)))
    return most


def left_of(case: dict[str, Any], sampling: Any, multiplier: float, drawn: int, *, lossy: bool, outside: bool) -> float:
    """The noise multiplier that is left for those who know one share, if they are clients."""
    shares = shares_of(case, sampling, drawn, lossy=lossy)
    if lossy:
        return multiplier / math.sqrt(shares)
    known = 0 if outside or case["placement"] == "central" or shares == 1 else 1
    return multiplier * math.sqrt((shares - known) / shares)


def cost_of(events: list[dp_events.DpEvent | None], case: dict[str, Any]) -> Any:
    """The cost of releases: in closed form, where all are plain; else by the accountant."""
    found = [event for event in events if event is not None]
    if all(isinstance(event, dp_events.GaussianDpEvent) for event in found):
        return gaussian_epsilon([event.noise_multiplier for event in found], case["relation"], case["delta"])
    return accounting.epsilon(dp_events.ComposedDpEvent(found), delta=case["delta"], relation=case["relation"]).epsilon


def sum_strategy(case: dict[str, Any], **options: Any) -> Any:
    distributed = {"placement": "distributed"}
    cls, own = {
        "central": (methods.DPFedAvg, {}),
        "trusted": (methods.DPFedAvg, distributed),
        "untrusted": (methods.DPFedAvg, distributed | {"server_completes_noise": False, "min_reply_ratio": case["ratio"]}),
        "lossy": (methods.DPFedSAM, distributed | {"keep_ratio": 0.5}),
    }[case["placement"]]
    evaluation = None
    if case["every"]:
        evaluation = methods.PrivateEvaluation(
            noise_multiplier=case["multipliers"][1], sampling=case["evaluating"], every=case["every"], metrics={"loss": 4.0}
        )
    common = {"clip_norm": case["clip_norm"], "noise_multiplier": case["multipliers"][0], "sampling": case["sampling"]}
    common |= {"num_clients": len(case["gaps"].sizes), "delta": case["delta"], "relation": case["relation"]}
    return cls(**common, evaluation=evaluation, **own, **options)


@quickly(24)
@given(sum_cases())
def test_the_statement_of_a_noised_sum_is_that_of_its_rounds_by_hand(case):
    there: Gaps = case["gaps"]
    with TemporaryDirectory() as folder:
        found = run(there, lambda: sum_strategy(case), lambda **node: DPClient(training=TRAINING, **node), Path(folder, "run"))
    strategy, statement = found.strategy, found.strategy.statement
    rounds = range(1, ROUNDS + 1)
    releases = [("train", case["sampling"], case["multipliers"][0], case["placement"] == "lossy", list(rounds))]
    if case["every"]:
        due = [one for one in rounds if one % case["every"] == 0 and one != there.unfinished]
        releases.append(("evaluate", case["evaluating"], case["multipliers"][1], False, due))
    charged = [strategy.charges.number(one.name) for one in strategy.rules.releases]
    assert charged == [len(one[-1]) for one in releases]
    told = by_name(statement)
    costs = {"outsiders": [], "participants": [], "the server": []}
    kinds = []
    for kind, sampling, multiplier, lossy, due in releases:
        asked = found.grid.asked(kind)
        drawn = [
            len(asked.get(one, [])) for one in due
        ]  # of a cohort without anybody no message tells, and it is charged as well
        inside = [left_of(case, sampling, multiplier, one, lossy=lossy, outside=False) for one in drawn]
        outside = [left_of(case, sampling, multiplier, one, lossy=lossy, outside=True) for one in drawn]
        kinds.append((inside, outside))
        costs["participants"] += [sum_event(case, sampling, z, number, lossy=lossy) for number, z in enumerate(inside, start=1)]
        costs["outsiders"] += [sum_event(case, sampling, z, number, lossy=lossy) for number, z in enumerate(outside, start=1)]
        most = shares_of(case, sampling, len(there.sizes), lossy=lossy)
        costs["the server"] += [dp_events.GaussianDpEvent(multiplier / math.sqrt(most))] * len(due)
    assert told["participants"].epsilon == pytest.approx(cost_of(costs["participants"], case), rel=1e-6, abs=1e-9)
    assert told["outsiders"].epsilon == pytest.approx(cost_of(costs["outsiders"], case), rel=1e-6, abs=1e-9)
    assert statement.epsilon == told["participants"].epsilon
    assert told["participants"].lowest_noise_std == pytest.approx(case["clip_norm"] * min(kinds[0][0]))
    assert told["outsiders"].lowest_noise_std == pytest.approx(case["clip_norm"] * min(kinds[0][1]))
    central = case["placement"] == "central"
    assert told["the server"].epsilon == pytest.approx(
        math.inf if central else cost_of(costs["the server"], case), rel=1e-6, abs=1e-9
    )
    most = shares_of(case, case["sampling"], len(there.sizes), lossy=case["placement"] == "lossy")
    share = 0.0 if central else case["clip_norm"] * case["multipliers"][0] / math.sqrt(most)
    assert told["the server"].lowest_noise_std == pytest.approx(share)
    assert statement.epsilon <= strategy.epsilon * (1 + 1e-9) <= 1.5 * statement.epsilon + 0.1
    if case["every"]:
        for part, (_, sampling, _, lossy, _), (inside, _) in zip(("training", "evaluation"), releases, kinds, strict=True):
            alone = cost_of([sum_event(case, sampling, z, number, lossy=lossy) for number, z in enumerate(inside, start=1)], case)
            assert statement.epsilon_by_release[part] == pytest.approx(alone, rel=1e-6, abs=1e-9)
    assert any("DELTA IS NO GUARANTEE" in line for line in statement.assumptions) == (case["delta"] * len(there.sizes) >= 1)
    found.assert_unfinished_are_told()


# NbAFL: what one broadcast has of each client


@st.composite
def broadcast_cases(draw: Any) -> dict[str, Any]:
    there = draw(gaps(sizes=(4, 30)))
    return {
        "gaps": there,
        "paper": draw(st.booleans()),
        "epsilon": draw(st.sampled_from([1.0, 6.0])),
        "clip_norm": draw(st.sampled_from([0.5, 2.0])),
        "uniform": draw(st.booleans()) and draw(st.booleans()),
        "exposures": draw(st.sampled_from([1, 2, ROUNDS, ROUNDS])),
        "replies": draw(st.sampled_from([ROUNDS, ROUNDS, 2])),
    }


def nbafl_words(case: dict[str, Any]) -> dict[str, Any]:
    noise: dict[str, Any] = {"epsilon": case["epsilon"]}
    if case["paper"]:
        noise = {"paper_epsilon": case["epsilon"], "uplink_exposures": case["exposures"]}
    return {"clip_norm": case["clip_norm"], "delta": 1e-3, "num_replies": case["replies"], **noise}


def nbafl_strategy(case: dict[str, Any]) -> methods.NbAFL:
    sizes = case["gaps"].sizes
    words = {"num_clients": len(sizes), "num_records": list(sizes)}
    return methods.NbAFL(**words, aggregation="uniform" if case["uniform"] else "data-size", **nbafl_words(case))


@quickly(12)
@given(broadcast_cases())
def test_the_statement_of_nbafl_is_that_of_its_broadcasts_by_hand(case):
    there: Gaps = case["gaps"]
    many, least, bound = len(there.sizes), min(there.sizes), case["clip_norm"]
    recipe = NbAFLRecipe(training=TRAINING, min_records=least, **nbafl_words(case))
    with TemporaryDirectory() as folder:
        found = run(there, lambda: nbafl_strategy(case), lambda **node: LocalDPClient(recipe=recipe, **node), Path(folder, "run"))
    # Wei et al. 2020: sigma_U = c L (2 C / m) / epsilon, sigma_D = c (2 C / (m N)) sqrt(T^2 - L^2 N) / epsilon; else what is proved.
    unit = math.sqrt(2 * math.log(1.25 / 1e-3)) * 2 * bound / least / case["epsilon"]
    proved = 2 * bound * math.sqrt(case["replies"]) * gaussian_multiplier(case["epsilon"], 1e-3)
    up = unit * case["exposures"] if case["paper"] else proved
    down = unit / many * math.sqrt(max(0, ROUNDS**2 - case["exposures"] ** 2 * many)) if case["paper"] else 0.0
    full = math.sqrt(down**2 + up**2 / many)
    sizes = [1] * many if case["uniform"] else there.sizes
    ratios: dict[str, list[list[float]]] = {name: [[], []] for name in there.names}
    stds: list[list[float]] = [[], []]
    for number in range(1, min(ROUNDS, case["replies"]) + 1):
        heard = [one for one in range(many) if there.heard(one, number)]
        parts = {one: sizes[one] / sum(sizes[other] for other in heard) for one in heard}
        wanted = max(parts.values(), default=0.0) * many * full
        left = dict.fromkeys(parts, wanted)
        for one, part in parts.items():
            known = max((other for who, other in parts.items() if who != one), default=0.0)
            left[one] = math.sqrt(wanted**2 - (known * up) ** 2)
            ratios[there.names[one]][0].append(wanted / (part * bound))
            ratios[there.names[one]][1].append(left[one] / (part * bound))
        if parts:
            stds[0].append(wanted)
            stds[1].append(min(left.values()))
    told = by_name(found.strategy.statement)
    for place, name in enumerate(("outsiders", "participants")):
        costs = [gaussian_epsilon(one[place], REPLACE, 1e-3) for one in ratios.values()]
        assert told[name].epsilon == pytest.approx(max(costs), rel=1e-3)
        assert told[name].lowest_noise_std == pytest.approx(min(stds[place], default=0.0), rel=1e-3)
    replies = min(ROUNDS, case["replies"])
    assert found.grid.asked("train") == dict.fromkeys(range(1, replies + 1), there.names)
    server = gaussian_epsilon([up / bound] * replies, REPLACE, 1e-3)
    shares = [size / sum(sizes) for size in sizes]
    assert told["the server"].epsilon == pytest.approx(server, rel=1e-3)
    assert told["the server"].lowest_noise_std == pytest.approx(up * min(shares), rel=1e-3)
    assert found.strategy.statement.epsilon == max(one.epsilon for one in told.values())
    ahead = by_name(forecast(nbafl_strategy(case), num_rounds=ROUNDS, names=there.names))
    assert all(told[name].epsilon <= ahead[name].epsilon * (1 + 1e-6) for name in told)
    assert found.strategy.statement.clients.by_client == pytest.approx(dict.fromkeys(there.names, server), rel=1e-3)
    if case["paper"]:
        assert told["the server"].paper_epsilon.valid == (
            replies <= case["exposures"] and case["epsilon"] / case["exposures"] < 1
        )
        assert told["outsiders"].paper_epsilon.valid == (case["epsilon"] / ROUNDS < 1)
        assert {told[name].paper_epsilon.epsilon for name in ("the server", "outsiders")} == {case["epsilon"]}
    found.assert_unfinished_are_told(min(ROUNDS, case["replies"]))


# A ledger of every client


@st.composite
def ledger_cases(draw: Any) -> dict[str, Any]:
    there = draw(gaps())
    many = len(there.sizes)
    rate = draw(st.sampled_from([1.0, 1.0, 0.5]))
    # To find the noise of samples takes long: then few clients differ.
    each = st.tuples(*(st.sampled_from([0.5, 2.0, 6.0] if rate == 1 else [2.0]) for _ in range(many)))
    return {
        "gaps": there,
        "laplace": draw(st.booleans()),
        "relation": draw(st.sampled_from([ADD, REPLACE])),
        "epsilons": dict(zip(there.names, draw(each), strict=True)),
        "replies": dict(zip(there.names, draw(st.tuples(*(st.integers(1, ROUNDS) for _ in range(many)))), strict=True)),
        "cohort": draw(st.integers(many - 1, many)),
        "uniform": draw(st.booleans()),
        "rate": rate,
        "evaluations": draw(st.integers(0, 3)),
        "evaluation_epsilons": dict(zip(there.names, draw(each), strict=True)),
        "every": draw(st.integers(1, 2)),
        "metrics": draw(st.sampled_from([{"accuracy": 1.0}, {"accuracy": 1.0, "loss": 3.0}])),
    }


def fedsgd(case: dict[str, Any]) -> tuple[Any, Any]:
    there: Gaps = case["gaps"]
    sizes = dict(zip(there.names, there.sizes, strict=True))
    laplace = case["laplace"]
    common: dict[str, Any] = {
        "mechanism": "laplace" if laplace else "gaussian",
        "clip_norm": 0.7,
        "epsilon": case["epsilons"],
        "delta": 0.0 if laplace else 1e-3,
        "num_replies": case["replies"],
        "num_records": sizes,
        "sampling_rate": 1.0 if laplace else case["rate"],
        "relation": case["relation"],
    }
    budget = None
    if case["evaluations"]:
        budget = methods.EvaluationBudget(epsilon=case["evaluation_epsilons"], num_evaluations=case["evaluations"])

    def strategy() -> methods.FedSGDDPC:
        evaluation = (
            None if budget is None else methods.LocalEvaluation(budget=budget, every=case["every"], metrics=case["metrics"])
        )
        own = {"num_clients": len(sizes), "cohort_size": case["cohort"], "learning_rate": 0.1, "evaluation": evaluation}
        return methods.FedSGDDPC(**common, **own, aggregation="uniform" if case["uniform"] else "data-size")

    recipe = FedSGDDPCRecipe(**common)
    return strategy, lambda **node: LocalDPClient(recipe=recipe, evaluation=budget, **node)


def turns(case: dict[str, Any], found: GappyRun) -> tuple[dict[str, int], int, int]:
    """How often each client was asked, how often one was not since its budget was spent, and the last round: in turn."""
    there: Gaps = case["gaps"]
    many, names = len(there.sizes), there.names
    replies, unasked = dict.fromkeys(names, 0), 0
    last = 0
    for number in range(1, ROUNDS + 1):
        if all(replies[name] == case["replies"][name] for name in names):
            break
        turn = sorted(names[(case["cohort"] * (number - 1) + one) % many] for one in range(case["cohort"]))
        able = [name for name in turn if replies[name] < case["replies"][name]]
        assert found.grid.asked("train").get(number, []) == able
        for name in able:
            replies[name] += 1
        unasked += len(turn) - len(able) if number != there.unfinished else 0  # no charge tells of it
        last = number
    return replies, unasked, last


@quickly(12)
@given(ledger_cases())
def test_the_statement_of_clients_with_their_own_budgets_is_that_of_their_replies_by_hand(case):
    there: Gaps = case["gaps"]
    many, names = len(there.sizes), there.names
    strategy, client = fedsgd(case)
    with TemporaryDirectory() as folder:
        found = run(there, strategy, client, Path(folder, "run"))
    replies, unasked, last = turns(case, found)
    evaluated = dict.fromkeys(names, 0)
    if case["evaluations"]:
        for number in range(case["every"], last + 1, case["every"]):
            if number != there.unfinished and max(evaluated.values()) < case["evaluations"]:
                evaluated = {name: count + 1 for name, count in evaluated.items()}
    statement = found.strategy.statement
    assert found.strategy.rules.training.counts(found.strategy.charges) == replies
    stds, scales, sensitivity = [], [], 2 if case["relation"] == REPLACE else 1
    for name, size in zip(names, there.sizes, strict=True):
        budget, most, count = case["epsilons"][name], case["replies"][name], replies[name]
        share = 1 / many if case["uniform"] else size / sum(there.sizes)
        weight = share * many / case["cohort"]
        alone = case["evaluation_epsilons"][name] * evaluated[name] / max(1, case["evaluations"])
        if case["laplace"]:
            trained = budget * count / most
            multiplier = sensitivity * most / budget
            assert statement.clients.by_client[name] == pytest.approx(trained + alone, rel=1e-6)
        else:
            multiplier = found.strategy.rules.books.terms[name].release.mechanism.noise_multiplier
            if case["rate"] == 1:
                assert multiplier == pytest.approx(sensitivity * math.sqrt(most) * gaussian_multiplier(budget, 1e-3), rel=1e-3)
                trained = gaussian_epsilon([multiplier] * count, case["relation"], 1e-3)
            else:
                event = dp_events.PoissonSampledDpEvent(case["rate"], dp_events.GaussianDpEvent(multiplier))
                trained = accounting.epsilon(
                    dp_events.ComposedDpEvent([event] * count), delta=1e-3, relation=case["relation"]
                ).epsilon
            assert trained * (1 - 1e-6) <= statement.clients.by_client[name] <= (trained + alone) * (1 + 1e-6)
            assert alone or statement.clients.by_client[name] == pytest.approx(trained, rel=1e-6)
            assert trained <= budget * 1.02
        scale = multiplier * 0.7 / (size * (1 if case["laplace"] else case["rate"]))
        scales.append(scale)
        stds.append(weight * scale * (math.sqrt(2) if case["laplace"] else 1))
        if case["evaluations"]:
            assert statement.clients.evaluation_by_client[name] == pytest.approx(alone, rel=1e-6, abs=1e-12)
    clients, costs = statement.clients, statement.clients.by_client
    summary = [min(costs.values()), statistics.median(costs.values()), *[max(costs.values())] * 3]
    assert [clients.minimum, clients.median, clients.maximum, costs[clients.worst], statement.epsilon] == summary
    assert clients.count == many
    assert [one.lowest_noise_std for one in statement.adversaries] == pytest.approx([min(stds)] * 3, rel=1e-6)
    numbers = [statement.noise[f"{word}_noise_scale_of_a_mean_gradient"] for word in ("min", "max")]
    assert numbers == pytest.approx([min(scales), max(scales)])
    assert max(costs.values()) <= found.strategy.epsilon * (1 + 1e-6)
    told = [line for line in statement.incidents if "was skipped" in line]
    assert told == ([f"{unasked} times a client was skipped because its budget was spent"] if unasked else [])
    found.assert_unfinished_are_told(last)
    if case["evaluations"]:
        assert_errors(case, found)


def assert_errors(case: dict[str, Any], found: GappyRun) -> None:
    """Every evaluation that came to something has the standard error of its noise, and of who answered, by their public weights."""
    there: Gaps = case["gaps"]
    sensitivity = 2 if case["relation"] == REPLACE else 1
    for number, metrics in found.strategy.evaluations.items():
        heard = [one for one in range(len(there.sizes)) if there.heard(one, number)]
        weights = [1 if case["uniform"] else there.sizes[one] for one in heard]
        parts = [weight / sum(weights) for weight in weights]
        half = len(case["metrics"]) / 2  # of a metric, a contribution of L1 norm 1 is two parts of so many
        scales = [
            sensitivity * case["evaluations"] / case["evaluation_epsilons"][there.names[one]] / there.sizes[one] for one in heard
        ]
        variance = sum(2 * (part * half * scale) ** 2 for part, scale in zip(parts, scales, strict=True))
        chosen = sum(part**2 for part in parts) if len(heard) < len(there.sizes) else 0.0
        for name, bound in case["metrics"].items():
            value = metrics[name] / bound
            error = bound * math.sqrt(variance + chosen * value * (1 - value))
            assert metrics[f"{name}-standard-error"] == pytest.approx(error, rel=1e-6)


# Local steps that shrink from round to round


@st.composite
def step_cases(draw: Any) -> dict[str, Any]:
    there = draw(gaps(sizes=(4, 5)))
    many = len(there.sizes)
    return {
        "gaps": there,
        "epsilons": dict(zip(there.names, draw(st.tuples(*(st.sampled_from([0.5, 4.0]) for _ in range(many)))), strict=True)),
        "replies": draw(st.sampled_from([ROUNDS, ROUNDS, 2])),
        "steps": draw(st.sampled_from([2, 1])),
        "batch": 2,
        "rate": draw(st.sampled_from([0.1, 0.4])),
        "decay": draw(st.sampled_from([0.5, 0.5, 0.0])),
        "pull": draw(st.sampled_from([0.7, 0.0])),
        "bound": draw(st.sampled_from([0.3, 2.0])),
        "max_resource_cost": draw(st.sampled_from([None, 25.0])),
    }


def step_methods(case: dict[str, Any]) -> tuple[Any, Any]:
    many, sizes = len(case["gaps"].sizes), dict(zip(case["gaps"].names, case["gaps"].sizes, strict=True))
    common: dict[str, Any] = {"epsilon": case["epsilons"], "delta": 1e-3}
    if case["fedpaq"]:
        steps = FedPAQSteps(
            learning_rate=case["rate"],
            decay_iterations=4 * case["decay"] or None,
            num_local_steps=case["steps"],
            batch_size=case["batch"],
            clip_norm=case["bound"],
            sensitivity="per-step",
        )
        common |= {"steps": steps, "num_replies": case["replies"]}
        server = {"sampling": FullSampling(), "num_clients": many, "num_records": sizes}
        recipe: Any = DPFedPAQRecipe(**common)
        return lambda: methods.DPFedPAQ(**common, **server), lambda **node: LocalDPClient(recipe=recipe, **node)
    common |= {
        "batch_size": case["batch"],
        "clip_norm": case["bound"],
        "num_steps": case["replies"] * case["steps"],
        "num_local_steps": case["steps"],
        "learning_rate": case["rate"],
        "learning_rate_decay": case["decay"],
        "weight_decay": case["pull"],
    }
    recipe = DPPASGDRecipe(**common)
    costs = {"cost_per_aggregation": 7.0, "cost_per_step": 1.0, "max_resource_cost": case["max_resource_cost"]}
    return (
        lambda: methods.DPPASGD(num_clients=many, num_records=sizes, **common, **costs),
        lambda **node: LocalDPClient(recipe=recipe, **node),
    )


@pytest.mark.parametrize("method", ["dp-pasgd", "dp-fedpaq"])
@quickly(7)
@given(step_cases())
def test_the_statement_of_local_steps_is_that_of_the_least_noise_of_any_round_by_hand(method, case):
    case = case | {"fedpaq": method == "dp-fedpaq"}
    there: Gaps = case["gaps"]
    strategy, client = step_methods(case)
    with TemporaryDirectory() as folder:
        found = run(there, strategy, client, Path(folder, "run"))
    statement, rules = found.strategy.statement, found.strategy.rules
    rounds = min(ROUNDS, case["replies"])
    if case["max_resource_cost"] and not case["fedpaq"]:
        rounds = min(rounds, int(case["max_resource_cost"] // (7 + case["steps"])))
    assert sorted(found.grid.asked("train")) == list(range(1, rounds + 1))
    assert statement.num_charged_rounds == rounds
    stds, papers = [], []
    for name, size in zip(there.names, there.sizes, strict=True):
        one = case["epsilons"][name]
        if case["fedpaq"]:
            # One step differs by 2 C, and E - 1 later ones by 2 b C each: noise for half of that, of a sample of E b records.
            taken = case["steps"] * case["batch"]
            length = ((case["steps"] - 1) * case["batch"] + 1) * case["bound"]
            multiplier = rules.books.terms[name].release.mechanism.noise_multiplier
            full = 2 * math.sqrt(case["replies"]) * gaussian_multiplier(one, 1e-3)
            assert multiplier == pytest.approx(full, rel=1e-3) if taken == size else multiplier < full * (1 + 1e-3)
            event: dp_events.DpEvent = dp_events.GaussianDpEvent(multiplier)
            event = event if taken == size else dp_events.SampledWithoutReplacementDpEvent(size, taken, event)
            cost = accounting.epsilon(dp_events.ComposedDpEvent([event] * rounds), delta=1e-3, relation=REPLACE).epsilon
            each = [
                case["rate"] / (1 + (n - 1) * case["steps"] / (4 * case["decay"])) if case["decay"] else case["rate"]
                for n in range(1, rounds + 1)
            ]
            stds += [rate / case["batch"] * multiplier * length for rate in each]
            part, delta = taken / size, 1e-3 / rounds
            papers.append(rounds * 2 * part * math.sqrt(2 * math.log(1.25 * part / delta)) * 2 / multiplier)
        else:
            multiplier = 2 * math.sqrt(case["replies"] * case["steps"]) * gaussian_multiplier(one, 1e-3)
            cost = gaussian_epsilon([multiplier] * (rounds * case["steps"]), REPLACE, 1e-3)
            for number in range(1, rounds + 1):
                rate = case["rate"] * (1 - case["decay"]) ** (number - 1)
                shrinks = math.sqrt(sum((1 - rate * case["pull"]) ** (2 * step) for step in range(case["steps"])))
                stds.append(rate * shrinks * multiplier * case["bound"] / case["batch"])
            rho = 2 * rounds * case["steps"] / multiplier**2
            papers.append(rho + 2 * math.sqrt(rho * math.log(1000)))
        assert statement.clients.by_client[name] == pytest.approx(cost, rel=2e-3)
    assert [one.lowest_noise_std for one in statement.adversaries] == pytest.approx([min(stds)] * 3, rel=1e-3)
    assert statement.paper_epsilon.epsilon == pytest.approx(max(papers), rel=1e-3)
    assert statement.epsilon <= found.strategy.epsilon * (1 + 1e-6)
    if not case["fedpaq"]:
        assert rules.costs(found.strategy.charges) == dict.fromkeys(there.names, rounds * (7.0 + case["steps"]))
    found.assert_unfinished_are_told(rounds)
