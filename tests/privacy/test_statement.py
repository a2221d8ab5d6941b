"""The privacy statement: strict JSON, truthful text."""

import dataclasses
import json
import math

import pytest

from flower_dp.privacy.statement import Adversary, ClientEpsilons, PaperEpsilon, PrivacyStatement

STATEMENT = PrivacyStatement(
    method="DP-FedSAM",
    unit="client",
    relation="add-or-remove-one",
    protected_against="everyone who sees global models",
    delta=1e-3,
    epsilon=7.30115,
    accountant="pld",
    paper_epsilon=PaperEpsilon(epsilon=8.57864, formula="RDP, Theorem 2", valid=True, reason="its assumptions hold"),
    num_charged_rounds=200,
    noise={"clip_norm": 0.2, "noise_multiplier": 0.95},
    sampling="Poisson, rate 0.1",
    events=("200 x PoissonSampledDpEvent",),
    assumptions=("the server is trusted",),
    not_covered=("CLIENT METRICS",),
    incidents=("3 replies refused",),
)


def test_text_says_everything() -> None:
    text = str(STATEMENT)
    for line in (
        "DP-FedSAM",
        "GUARANTEE      Each client has (7.3012, 0.001)-differential privacy (add-or-remove-one).",
        *("accountant pld", "200 charged rounds", "everyone who sees global models", "Poisson, rate 0.1", "clip norm 0.2"),
        *("noise multiplier 0.95", "8.5787", "valid here", "ASSUMPTIONS    1. the server is trusted"),
        *("NOT COVERED    - CLIENT METRICS", "INCIDENTS      - 3 replies refused"),
    ):
        assert line in text
    assert "NOT" not in text.replace("NOT COVERED", "")


def test_dictionary_is_strict_json_and_complete() -> None:
    data = json.loads(json.dumps(STATEMENT.to_dict(), allow_nan=False))
    assert data["format"] == 2
    guarantee, mechanism = data.pop("guarantee"), data.pop("mechanism")
    assert (guarantee["private"], guarantee["epsilon"]) == (True, 7.30115)
    assert mechanism["paper_epsilon"] == {
        "epsilon": 8.57864,
        "formula": "RDP, Theorem 2",
        "valid": True,
        "reason": "its assumptions hold",
    }
    fields = {field.name for field in dataclasses.fields(PrivacyStatement)}
    assert set(data) | set(guarantee) | set(mechanism) == {"format", "private"} | fields
    assert mechanism["events"] == ["200 x PoissonSampledDpEvent"]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_no_privacy_is_said_and_is_strict_json(value: float) -> None:
    paper = PaperEpsilon(epsilon=value, formula="f", valid=False, reason="no noise")
    statement = dataclasses.replace(STATEMENT, epsilon=value, paper_epsilon=paper)
    assert not statement.private
    assert "NOT PRIVATE" in str(statement)
    assert "differential privacy" not in str(statement)
    data = json.loads(json.dumps(statement.to_dict(), allow_nan=False))
    assert (data["guarantee"]["private"], data["guarantee"]["epsilon"], data["mechanism"]["paper_epsilon"]["epsilon"]) == (
        False,
        None,
        None,
    )
    assert statement.paper_epsilon == paper  # to_dict changes nothing


def test_an_invalid_paper_epsilon_is_flagged_and_a_missing_one_is_left_out() -> None:
    paper = PaperEpsilon(epsilon=1.0, formula="f", valid=False, reason="it assumes Poisson sampling")
    invalid = dataclasses.replace(STATEMENT, paper_epsilon=paper)
    assert "NOT VALID here: it assumes Poisson sampling" in str(invalid)
    none = dataclasses.replace(STATEMENT, paper_epsilon=None)
    assert "Paper" not in str(none)
    assert none.to_dict()["mechanism"]["paper_epsilon"] is None


def test_trust_is_said_of_every_trusted_adversary_and_a_choice_is_not_its_runs() -> None:
    seen = Adversary(name="the server", view="every message", epsilon=50.0, accountant="pld", lowest_noise_std=0.1, trusted=True)
    blind = dataclasses.replace(seen, name="outsiders", epsilon=7.0, trusted=False)
    text = str(dataclasses.replace(STATEMENT, adversaries=(blind, seen)))
    assert text.count("TRUSTED") == 2
    assert "outsiders             7.0000   0.1        pld         every message" in text
    assert "the server (TRUSTED)  50.0000  0.1        pld         every message" in text
    assert "TRUSTED not to look at single messages: no guarantee covers the server" in text
    assert "Protected against" not in text  # the table has more
    bare = str(dataclasses.replace(STATEMENT, adversaries=(dataclasses.replace(seen, epsilon=math.inf),)))
    assert "TRUSTED: no protection is claimed against the server." in bare
    choice = str(dataclasses.replace(STATEMENT, accountant="selection-pld", num_charged_rounds=1))
    assert "for the choice among K runs; the chosen run has 1 charged round." in choice


def _of_clients(*epsilons: float) -> list[str]:
    each = {f"c{number}": epsilon for number, epsilon in enumerate(epsilons)}
    low, high = min(epsilons), max(epsilons)
    costs = ClientEpsilons(
        count=len(each),
        minimum=low,
        median=low,
        maximum=high,
        worst=f"c{epsilons.index(high)}",
        by_client=each,
        evaluation_by_client=each,
    )
    return str(dataclasses.replace(STATEMENT, clients=costs)).partition("CLIENTS")[2].partition("\n\n")[0].split("\n")


def test_fifty_clients_with_one_epsilon_are_one_line() -> None:
    # What differs beyond the digits that are shown is rounded up to the same number.
    assert _of_clients(*[2.0] * 49, 1.99999) == [
        "        50 clients: epsilon 2.0000 for each of them.",
        "               Each client's evaluations alone: 2.0000.",
    ]


def test_clients_with_other_epsilons_are_named_one_by_one() -> None:
    assert _of_clients(2.0, 2.0, 2.5) == [
        "        3 clients: epsilon at least 2.0000, median 2.0000, at most 2.5000 (c2).",
        "               Each client: c0 2.0000, c1 2.0000, c2 2.5000.",
        "               Each client's evaluations alone: c0 2.0000, c1 2.0000, c2 2.5000.",
    ]
