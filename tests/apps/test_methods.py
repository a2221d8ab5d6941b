import math

import pytest
import torch

from flower_dp.apps.methods import ParsedRunConfig, defaults
from flower_dp.apps.tasks import module_of as task_module
from flower_dp.clients import (
    BLUR,
    LUS,
    DPClient,
    LocalDPClient,
    ProximalTerm,
    TensorRecords,
)
from flower_dp.clients.refusal_messages import Declined
from flower_dp.clients.training.losses import hinge
from flower_dp.methods import METHODS
from flower_dp.strategies import AdaptiveClip, EvaluationBudget, LocalEvaluation
from flower_dp.strategies.releases.noised_sum import SumState
from flower_dp.strategies.run_state import RunState
from tests.app_runs import DEFAULTS, PRESETS, with_table
from tests.asks import ask, replace

LAPLACE = PRESETS["mnist-fedsgd-dpc-laplace"]
NBAFL = PRESETS["mnist-nbafl"]
PASGD = PRESETS["mnist-dp-pasgd"]


# Of every client; as many as any preset takes in a round.
RECORDS = 200


def run_of(arguments):
    return ParsedRunConfig.of({**DEFAULTS, **with_table(arguments)})


def strategy_of(run):
    return run.strategy(sizes_of(run))


def sizes_of(run, size=RECORDS):
    return lambda: dict.fromkeys(run.settings.client_names(), size)


def data(size=RECORDS, num_features=784):
    return TensorRecords(inputs=torch.zeros(size, num_features), targets=torch.zeros(size, dtype=torch.int64))


def client(run, size=RECORDS):
    names = run.settings.client_names()[:2]
    num_features = task_module(run.settings.task).num_features(run.of_task)
    return run.client(run.model(), {name: data(size, num_features) for name in names}, sizes_of(run, size))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_makes_a_strategy_and_a_client_that_agree(name):
    """Before the first round nothing is spent."""
    run = run_of(PRESETS[name])
    strategy = strategy_of(run)
    statement = strategy.statement
    assert (statement.epsilon, statement.to_dict()["guarantee"]["num_charged_rounds"]) == (0, 0)
    node = client(run)
    assert isinstance(node, LocalDPClient if METHODS[run.settings.method].recipe else DPClient)
    assert strategy.num_clients == run.settings.num_clients
    if isinstance(node, LocalDPClient):
        # The server's terms for a client, and the client's own.
        strategy.plan(run.settings.num_rounds)
        strategy._session.register_clients(tuple(run.settings.client_names()))
        first = run.settings.client_names()[0]
        assert strategy.rules.books.terms[first].text == node.recipe.terms(first, node.clients[first]).text


def test_what_several_settings_decide_reaches_strategy_and_recipe():
    ten = ",".join(str(value) for value in range(1, 11))
    run = run_of({**LAPLACE, "client-epsilons": ten, "aggregation": "uniform", "cohort-size": 3})
    assert strategy_of(run).rules.books.population.aggregation == "uniform"
    assert (client(run).recipe.epsilon["client-9"], client(run).recipe.num_replies) == (10.0, 12)  # ceil(3 x 40 / 10)
    assert client(run_of({**LAPLACE, "epsilon": math.inf})).recipe.terms("client-0", data()).release.noise_scale == 0
    run = run_of({**PRESETS["mnist-nbafl-k-of-n"], "uplink-exposures": 0, "num-replies": 0})
    assert (strategy_of(run).rules.cohort_size, strategy_of(run).rules.uplink_exposures) == (20, 25)
    recipe = client(run).recipe
    assert (recipe.training.regularizers[0].strength, recipe.min_records, recipe.num_replies) == (0.1, RECORDS, 25)
    sizes = {"client-epsilons": ten, "client-batch-sizes": ",".join(["8"] * 9 + ["16"]), "validation-ratio": 0.1}
    run = run_of({**PASGD, **sizes, "weight-decay": 0.1})
    recipe, rules = client(run).recipe, strategy_of(run).rules
    prices = rules.resources
    assert (prices.cost_per_aggregation, prices.cost_per_step, prices.max_resource_cost) == (100.0, 1.0, 1000.0)
    assert rules.best_model_metric == "validation-loss"
    assert (recipe.num_steps, recipe.num_local_steps, recipe.weight_decay) == (90, 10, 0.1)
    assert (recipe.epsilon["client-9"], recipe.batch_size["client-0"], recipe.batch_size["client-9"]) == (10.0, 8, 16)
    without = run_of({**PRESETS["mnist-dp-sgd"], "max-resource-cost": 0.0, "num-steps": 30})
    rules = strategy_of(without).rules
    assert (client(without).recipe.num_steps, rules.best_model_metric, rules.resources.max_resource_cost) == (30, "loss", None)


def test_regularizers_and_sparsifier_reach_the_recipe_of_every_method_that_reads_them():
    arguments = {"proximal-mu": 0.25, "blur-strength": 1.0, "blur-bound": 2.0}
    both = (ProximalTerm(strength=0.25), BLUR(strength=1.0, bound=2.0))
    for method in ("dp-fedavg", "dp-fedsam", "fed-smp"):
        training = client(run_of({"method": method, "lus-keep-ratio": 0.5, **arguments})).training
        assert (training.regularizers, training.sparsifier) == (both, LUS(keep_ratio=0.5))
    assert client(run_of({**NBAFL, **arguments})).recipe.training.regularizers == both
    assert (client(run_of({})).training.regularizers, client(run_of({})).training.sparsifier) == ((), None)


def test_a_preset_of_dp_pasgd_says_its_planning_problem():
    run = run_of({**PASGD, "client-epsilons": ",".join(["3", "2", *"44444444"])})
    inputs = run.planning(None, {})
    wanted = {"epsilon": 2.0, "delta": 1e-4, "learning_rate": 0.1, "clip_norm": 1.0, "batch_size": 64}
    assert inputs.values == wanted | {"cost_per_aggregation": 100.0, "cost_per_step": 1.0, "max_resource_cost": 1000.0}
    assert inputs.notes == ("epsilon is the smallest of the clients' budgets",)


ON = {"private-evaluation.every": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**LAPLACE, "sampling": "fixed-size"}, "sampling='fixed-size': must be round-robin"),
        ({**LAPLACE, "client-epsilons": "1,2"}, "client-epsilons: has 2 numbers"),
        ({**LAPLACE, "client-epsilons": "1,two"}, "client-epsilons='1,two': must be comma-separated numbers"),
        ({**PASGD, "client-batch-sizes": "8,x"}, "client-batch-sizes='8,x': must be comma-separated whole numbers"),
        ({**PASGD, "num-steps": 85}, "num_steps=85: must be a multiple of num_local_steps=10"),
        ({**LAPLACE, "strong-convexity": 1.0}, "smoothness=0.0"),
        ({**LAPLACE, "local-epochs": 5}, "local-epochs=5: is not read by method='fedsgd-dpc'"),
        ({**NBAFL, "placement": "distributed"}, "placement='distributed': unknown setting"),
        ({**NBAFL, "lus-keep-ratio": 0.5}, "is not read by method='nbafl', but by dp-fedavg, dp-fedsam, dp-ftrl, fed-smp$"),
        (
            {"method": "dp-fedavg", "server-completes-noise": False},
            "server_completes_noise=False: is read with placement='distributed' only",
        ),
        ({"cohort-size": 5}, "cohort-size=5: is not read with sampling='poisson', but with fixed-size or round-robin"),
        ({"num-clients": 3}, "delta: num-clients=3 gives 0.299 by default, which is not a guarantee"),
        ({"method": "fed-smp", "random-ratio": 0.5}, "random_ratio=0.5: is read with mask='top-k' only"),
        ({"blur-bound": 0.5}, "blur-bound=0.5: is read with blur-strength above 0 only"),
        ({"blur-strength": 1.0}, "blur-bound=0.0: must be above 0 with blur-strength"),
        ({"adult.features": "all"}, "adult.features='all': is not read by task='mnist', whose settings begin with 'mnist.'"),
        ({"task": "adult", "adult.features": "some"}, "adult.features='some': must be one of categorical, all"),
        ({"task": "adult", "model": "cnn"}, "model='cnn': does not fit task='adult'; must be one of logistic, mlp"),
        ({"validation-ratio": 0.5, "test-ratio": 0.5}, "validation-ratio=0.5: with test-ratio=0.5 leaves no record to train on"),
        ({"partition": "sample", "records-per-client": 9, "test-ratio": 0.1}, "partition='sample': clients share records"),
        ({"private-evaluation.every": 1.5}, "private-evaluation.every=1.5: must be of type int"),
        ({"private-evaluation.every": 5, "num-rounds": 4}, "private-evaluation.every=5: must be at most num-rounds=4"),
        (
            {"private-evaluation.noise-multiplier": 2.0},
            "private-evaluation.noise-multiplier=2.0: is read with private-evaluation.every above 0 only",
        ),
        ({"private-evaluation.metrics": "f1=1"}, "private-evaluation.metrics='f1=1'.* the metrics are loss, accuracy"),
        (
            {"private-evaluation.often": 1},
            "private-evaluation.often=1: unknown setting; the page Settings of the documentation lists all",
        ),
        (
            ON | {"private-evaluation.epsilon": 1.0},
            "private-evaluation.epsilon=1.0: .* method='dp-fedsam' has private-evaluation.noise-multiplier",
        ),
        ({**LAPLACE} | ON, "private-evaluation.epsilon=0.0: must be above 0 for method='fedsgd-dpc'"),
        (
            {**LAPLACE, "private-evaluation.epsilon": 1.0, "private-evaluation.noise-multiplier": 2.0} | ON,
            "is not read by method='fedsgd-dpc'",
        ),
    ],
)
def test_nonsense_is_refused_naming_the_key(arguments, message):
    with pytest.raises(ValueError, match=message):
        strategy_of(run_of(arguments))


def test_a_simulated_client_insists_on_its_share_of_the_noise():
    noise = {"delta": 1e-3, "clip-norm": 0.3, "noise-multiplier": 1.1, "keep-ratio": 0.4}
    run = run_of({"num-clients": 7, "sampling": "full", **noise})
    strategy, node = strategy_of(run), client(run)
    asked, *_ = strategy.rules.training.ask(strategy.state, node.model.layout.size, tuple(node.clients), None)
    assert asked.noise_std == pytest.approx(1.1 * 0.3 / math.sqrt(7))
    node.policy.check(asked)
    with pytest.raises(ValueError, match="noise_std="):
        node.policy.check(replace(asked, noise_std=0.99 * asked.noise_std))
    central = ask(clip_norm=0.3, noise_multiplier=1.1)
    assert central.noise_std == 0.0
    with pytest.raises(ValueError, match="noise_std="):
        node.policy.check(central)


def test_a_client_evaluates_as_its_own_run_config_says_and_no_other_way():
    arguments = {"sampling": "full", "num-clients": 16, "delta": 1e-3}
    policy = client(run_of({**arguments, "private-evaluation.every": 1})).policy
    # Shares of all 16 clients, of std 4 together.
    assert (policy.allow_evaluation, policy.min_evaluation_noise_multiplier) == (True, 4.0)
    assert policy.min_evaluation_noise_std == pytest.approx(1.0)
    assert not client(run_of(arguments)).policy.allow_evaluation


def test_both_sides_of_a_method_with_client_budgets_have_the_same_budget_of_evaluations():
    run = run_of({**LAPLACE, "num-rounds": 40, "private-evaluation.every": 15, "private-evaluation.epsilon": 0.5})
    budget = EvaluationBudget(epsilon=0.5, num_evaluations=2)
    assert strategy_of(run).rules.evaluation.plan == LocalEvaluation(budget=budget, every=15)
    assert client(run).evaluation_budget == budget
    assert client(run_of(LAPLACE)).evaluation_budget is None


def test_the_metrics_are_those_of_the_model():
    node = client(run_of({"task": "vehicle", "model": "linear-svm", "num-clients": 100}))
    records = TensorRecords(inputs=torch.ones(4, 100), targets=torch.tensor([1, 1, 1, -1]))
    with torch.no_grad():
        for parameter in node.model.module.parameters():
            parameter.copy_(torch.full_like(parameter, 0.005))
        found = node.metrics(node.model.module, records)
    # Outputs of 0.505 speak for +1; the hinge loss is 0.495, and 1.505 for the wrong label.
    assert found == pytest.approx({"loss": (3 * 0.495 + 1.505) / 4, "accuracy": 0.75})


def test_the_repositorys_flower_app_has_the_defaults_of_the_code():
    """So that plain `flwr run .` runs what `flower-dp run` does."""
    assert {key: (type(value), value) for key, value in defaults().items()} == {
        key: (type(value), value) for key, value in DEFAULTS.items()
    }


def test_the_models_loss_reaches_every_client():
    assert client(run_of(PRESETS["vehicle-fedsgd-dpc"])).recipe.loss is hinge
    assert client(run_of(LAPLACE)).recipe.loss is torch.nn.functional.cross_entropy
    svm = {"task": "vehicle", "model": "linear-svm"}
    assert client(run_of({**NBAFL, **svm})).recipe.training.loss is hinge
    assert client(run_of(svm)).training.loss is hinge


@pytest.mark.parametrize("name", ["dp-fedavg", "dp-fedsam", "fed-smp"])
def test_a_quantile_makes_the_clip_norm_adaptive_and_the_devices_policy_knows_both_ends(name):
    config = {"method": name, "clip-norm": 0.25, "clip-quantile": 0.7, "clip-learning-rate": 0.3}
    config |= {"clip-count-noise-std": 9.0, "max-clip-norm": 7.0}
    run = run_of(config)
    rules = run.strategy(lambda: {}).rules
    expected = AdaptiveClip(
        initial_clip_norm=0.25,
        target_quantile=0.7,
        learning_rate=0.3,
        count_noise_std=9.0,
        min_clip_norm=0.00025,
        max_clip_norm=7.0,
    )
    assert rules.training.clip.of == expected
    policy = client(run).policy
    assert (policy.min_clip_norm, policy.max_clip_norm) == (0.00025, 7.0)
    for clip_norm in (0.00025, 0.25, 7.0):
        state = RunState(releases={rules.training.name: SumState(clip_norm=clip_norm)})
        asked, *_ = rules.training.ask(state, 100, ("a",), None)
        policy.check(asked)
        if asked.noise_std:
            with pytest.raises(Declined, match="noise_std"):
                policy.check(replace(asked, noise_std=0.99 * asked.noise_std))
    with pytest.raises(ValueError, match=r"max-clip-norm=7\.0: is read with clip-quantile > 0 only"):
        run_of(config | {"clip-quantile": 0.0, "clip-count-noise-std": 0.0}).strategy(lambda: {})


@pytest.mark.parametrize(
    ("sampling", "hosted", "size"),
    [
        ({"sampling-rate": 0.1, "num-clients": 1000}, 1000, 130),  # 100 expected, and three times their square root
        ({"sampling-rate": 0.1, "num-clients": 1000}, 250, 40),
        ({"sampling": "fixed-size", "cohort-size": 100, "num-clients": 1000}, 500, 72),
        ({"sampling-rate": 0.9, "num-clients": 10}, 5, 5),
    ],
)
def test_a_group_on_a_gpu_has_as_many_clients_as_a_round_is_expected_to_draw_of_a_node(sampling, hosted, size):
    """By settings alone, never by which clients are drawn."""
    run = run_of({"method": "dp-fedavg", "noise-multiplier": 1.0, "target-epsilon": 0.0, "delta": 1e-3, **sampling})
    names = run.settings.client_names()[:hosted]
    node = run.client(run.model(), dict.fromkeys(names, data()), sizes_of(run))
    assert node.group_size == size


def test_a_devices_policy_has_the_separation_of_its_own_settings():
    words = {"method": "dp-ftrl", "num-clients": 20, "cohort-size": 2, "num-rounds": 8, "dp-ftrl.delta": 1e-3}
    for changes, expected in (({}, (8, None)), ({"min-separation": 3, "max-participations": 2}, (3, 2))):
        run = ParsedRunConfig.of({**DEFAULTS, **words, **changes})
        policy = run.client(run.model(), {"client-00": range(9)}, dict).policy
        assert (policy.min_separation, policy.max_participations) == expected
        rules = run.strategy(dict).rules
        assert policy.whole_run
        assert 0.998 < policy.min_noise_multiplier * rules.noise.run_sensitivity / 2.0 <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min-separation": 11}, "min-separation=11: cohort-size=2 of num-clients=20 can be full only with at most 10"),
        (
            {"num-rounds": 100, "max-participations": 9},
            "max-participations=9: num-rounds=100 with cohort-size=2 needs 10 of each of num-clients=20",
        ),
        ({"cohort-size": 0}, "cohort-size=0: must be a whole number >= 1"),
        ({"dp-ftrl.noise": "banded"}, "bands=0: must be set with noise='banded'"),
    ],
)
def test_cohorts_that_can_not_be_full_are_refused_before_a_run(changes, message):
    words = {"method": "dp-ftrl", "num-clients": 20, "cohort-size": 2, "num-rounds": 8, "dp-ftrl.delta": 1e-3}
    with pytest.raises(ValueError, match=message):
        ParsedRunConfig.of({**DEFAULTS, **words, **changes}).strategy(dict)
