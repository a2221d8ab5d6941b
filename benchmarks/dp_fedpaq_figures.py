"""Reproduce Figs. 2, 3b and 4 of the DP-FedPAQ paper, and SCAFFOLD with privacy: test loss over E, M, epsilon, C and gamma.

    python benchmarks/dp_fedpaq_figures.py RESULTS.jsonl --data-dir DIR [--seeds N] [--parts PART ...] [--plot FILE.png]
                                           [--scaffold-plot FILE.png] [--no-runs]

From the paper: logistic regression on MNIST, HET_MNIST(2), N = 100, M = 10, K = 100 rounds, E = 10, s = 10, gamma = E b / n with
E b = 120 of 542 records, C = 1, delta 1e-4, eta_k = 0.1 / (1 + kE/100); one of them is changed at a time. Without noise all else
is the same. The sensitivity to one record is either 2 eta C / b ("2 eta C / b", which nobody has proved for ten classes and
E > 1; the paper names no sensitivity at all) or the one that the package proves for any model ("per-step"). The noise is eq.
17's, as `calibration="paper"` makes it, and in the part `scaffold` that of `calibration="exact"`.

The program makes the hundreds of runs by steps written out for this one model, all clients of a round at once: 50 times as fast
as the package. Noise, epsilons, data and initial models are the package's. Before the first run the program compares a client's
local steps with the package's. NOT PRIVATE: everything here, also the noise, is drawn from the seed.

Each run is a line of RESULTS.jsonl, written when it ends. To resume, repeat the command: it skips the runs that are in the file.
One process, one torch thread.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import points
import torch
from points import ParsedRunConfig, Row, config_of, deviation, quiet, records, spread, table
from torch import Tensor

from flower_dp.clients import DPFedPAQRecipe, FlatModel
from flower_dp.clients.reply.pipeline import ClientJob
from flower_dp.privacy import accounting
from flower_dp.privacy.client_terms import ClientTerms
from flower_dp.privacy.dp_fedpaq import FedPAQSteps, expected_replies, update_terms

CLIENTS, RECORDS, CLASSES, DELTA, RATE, DECAY = 100, 542, 10, 1e-4, 0.1, 100.0
NOT_PROVED, PROVED = "2 eta C / b", "per-step"
INF = math.inf
CHOSEN, FEW, MANY = 120, 30, 480


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A point of the experiment; its attributes are keys of a line of the results."""

    steps: int = 10
    batch: int = 12
    cohort: int = 10
    rounds: int = 100
    levels: int = 10
    clip: float = 1.0
    epsilon: float = INF
    sensitivity: str = NOT_PROVED
    calibration: str = "paper"
    method: str = "dp-fedpaq"
    digits: int = 2

    @property
    def terms(self) -> ClientTerms:
        """Return the package's terms with this much noise and the proved sensitivity `per-step`."""
        epsilon = self.epsilon
        if self.sensitivity == NOT_PROVED:  # the same noise, of a sensitivity so many times larger
            epsilon *= (self.steps - 1) * self.batch + 1
        return _terms(self.product_steps, epsilon, self.rounds, self.cohort, self.calibration)

    @property
    def product_steps(self) -> FedPAQSteps:
        """Return the steps as the package takes them."""
        given: dict[str, Any] = {"learning_rate": RATE, "sensitivity": PROVED, "decay_iterations": DECAY}
        return FedPAQSteps(num_local_steps=self.steps, batch_size=self.batch, clip_norm=self.clip, **given)

    def proved(self, replies: int | None = None) -> float:
        """Return the proved epsilon of so many replies of a client together, by default of all."""
        if math.isinf(self.epsilon):
            return INF
        terms = self.terms
        event = accounting.repeated(terms.release.event(1), replies or terms.num_replies)
        return accounting.epsilon(event, delta=DELTA, relation="replace-one").epsilon


@cache
def _terms(steps: FedPAQSteps, epsilon: float, rounds: int, cohort: int, calibration: str) -> ClientTerms:
    replies = expected_replies(rounds, cohort, CLIENTS, at_random=True)
    return update_terms(
        steps=steps, epsilon=epsilon, delta=DELTA, num_replies=replies, num_records=RECORDS, calibration=calibration
    )


class Problem:
    """The clients' records and the initial model of a seed.

    Attributes:
        inputs: features [clients, records, features + 1], with a column of ones for the bias.
        wanted: one-hot labels [clients, records, classes].
        start: initial weights [classes, features + 1].
    """

    def __init__(self, seed: int, digits: int, data_dir: str) -> None:
        dealing = {"partition": "het-mnist", "classes-per-client": digits, "num-clients": CLIENTS}
        self.config = config_of("mnist-dp-fedpaq", {**dealing, "seed": seed, "data-dir": data_dir})
        self.run, dealt = ParsedRunConfig.of(self.config), records.deal(records.config_of(self.config))
        self.clients = [dealt.clients[name] for name in sorted(dealt.clients)]
        batches = [one.batch(torch.arange(RECORDS), torch.device("cpu")) for one in self.clients]
        self.inputs = torch.stack([_with_ones(inputs) for inputs, _ in batches])
        self.wanted = torch.nn.functional.one_hot(torch.stack([targets for _, targets in batches]), CLASSES).to(torch.float32)
        self.start = _matrix([parameter.detach() for parameter in self.run.model().parameters()])
        public = records.records_to_test_with(self.run, records.config_of(self.config))
        inputs, self.labels = public.batch(torch.arange(len(public)), torch.device("cpu"))
        self.tests = _with_ones(inputs)

    @cached_property
    def norms(self) -> Tensor:
        """Return the norms of the inputs [clients, records]."""
        return torch.linalg.vector_norm(self.inputs, dim=2)

    def test(self, model: Tensor) -> tuple[float, float]:
        """Return loss and accuracy on the public test records."""
        scores = self.tests @ model.T
        accuracy = (scores.argmax(1) == self.labels).float().mean().item()
        return torch.nn.functional.cross_entropy(scores, self.labels).item(), accuracy

    def updates(self, model: Tensor, case: Case, who: Tensor, places: Tensor, rate: float, drift: Tensor | None) -> Tensor:
        """Return the updates [m, classes, features + 1] of some clients that take these of their records [m, E b]."""
        here = model.expand(len(who), -1, -1).clone()
        for batch in places.split(case.batch, dim=1):
            inputs = self.inputs[who[:, None], batch]
            errors = torch.softmax(inputs @ here.transpose(1, 2), dim=2) - self.wanted[who[:, None], batch]
            norms = torch.linalg.vector_norm(errors, dim=2) * self.norms[who[:, None], batch]
            errors *= (case.clip / norms.clamp(min=case.clip))[:, :, None]
            mean = errors.transpose(1, 2) @ inputs / case.batch
            here -= rate * (mean if drift is None else mean + drift)
        return here - model


def _with_ones(inputs: Tensor) -> Tensor:
    flat = inputs.flatten(start_dim=1).to(torch.float32)
    return torch.cat([flat, torch.ones(len(flat), 1)], dim=1)


def _matrix(parameters: Sequence[Tensor]) -> Tensor:
    weights, bias = parameters
    return torch.cat([weights, bias[:, None]], dim=1)


def _row(matrix: Tensor) -> Tensor:
    return torch.cat([matrix[:, :-1].flatten(), matrix[:, -1]])


def check(problem: Problem) -> None:
    """Compare a client's local steps with the package's, on the same records in the same order, with SCAFFOLD's correction."""
    case, flat = Case(steps=3, clip=0.5), FlatModel(problem.run.model())
    recipe = DPFedPAQRecipe(steps=case.product_steps, epsilon=INF, delta=DELTA, num_replies=1)
    drift = 0.1 * torch.randn(problem.start.shape, generator=torch.Generator().manual_seed(1))
    release = recipe.terms("", problem.clients[7]).release
    pipeline = recipe.pipeline(release, model=flat, server_round=1, drift=_row(drift).to(torch.float64))
    job = ClientJob(name="", records=problem.clients[7], seed=0, secret=lambda: np.random.default_rng(5))
    ((total, _),) = pipeline.train.rows(flat.vector.clone(), [job])
    product = total if pipeline.after_noise is None else pipeline.after_noise(total)
    places = torch.from_numpy(np.random.default_rng(5).permutation(RECORDS)[: case.steps * case.batch])[None]
    (made,) = problem.updates(problem.start, case, torch.tensor([7]), places, RATE, drift[None])
    own = _row(made)
    if not torch.allclose(own, product, rtol=1e-3, atol=1e-5 * float(product.abs().max())):
        raise SystemExit(f"local steps differ from the package's by up to {float((own - product).abs().max()):.3g}")


def quantized(rows: Tensor, levels: int, rng: torch.Generator) -> Tensor:
    """Return every row [m, d] after QSGD: rounded at random and without bias to levels of its norm."""
    scale = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    drawn = torch.floor(rows.abs() * (levels / scale) + torch.rand(rows.shape, generator=rng)).clamp(max=levels)
    return rows.sign() * drawn * (scale / levels)


def run(problem: Problem, case: Case, seed: int) -> Row:
    """Make a run; return test loss and accuracy at some rounds."""
    began, rng = time.process_time(), torch.Generator().manual_seed(seed)
    model, steps = problem.start.clone(), case.product_steps
    noise = 0.0 if math.isinf(case.epsilon) else case.terms.release.noise_scale
    own = common = torch.zeros(0)
    if case.method == "scaffold":
        own, common = torch.zeros(CLIENTS, *model.shape), torch.zeros_like(model)
    found: dict[str, list[float]] = {"rounds": [], "loss": [], "accuracy": []}
    for number in range(1, case.rounds + 1):
        rate = steps.step_size(number)
        who = torch.randperm(CLIENTS, generator=rng)[: case.cohort]
        places = torch.rand(case.cohort, RECORDS, generator=rng).argsort(dim=1)[:, : case.steps * case.batch]
        drift = common - own[who] if case.method == "scaffold" else None
        made = problem.updates(model, case, who, places, rate, drift)
        if noise:
            made += rate / case.batch * noise * torch.randn(made.shape, generator=rng)
        sent = quantized(made.flatten(1), case.levels, rng).view_as(made) if case.levels else made
        if case.method == "scaffold":
            change = -common - sent / (case.steps * rate)
            own[who] += change
            common = common + change.sum(dim=0) / CLIENTS
        model = model + sent.mean(dim=0)
        if number in (20, case.rounds) or number % max(1, case.rounds // 20) == 0:
            loss, accuracy = problem.test(model)
            for key, value in (("rounds", number), ("loss", loss), ("accuracy", accuracy)):
                found[key].append(value)
    return {"seed": seed, **found, "seconds": round(time.process_time() - began, 2)}


# The points

STEPS, COHORTS, CLIPS = (1, 2, 5, 10, 20), (1, 2, 5, 10, 20, 50), (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
EPSILONS, PROVED_EPSILONS, TAKEN = (0.1, 0.3, 1.0, 3.0, 10.0, INF), (10.0, 100.0, 1000.0), (FEW, 60, CHOSEN, 240, MANY)
CLIPS_TOGETHER, TAKEN_TOGETHER = (0.25, 0.5, 1.0, 2.0), (FEW, CHOSEN, MANY)
EPSILON, PROVED_EPSILON, ITERATIONS = 1.0, 100.0, 2000
# Digits of a client, local steps, epsilon of all replies.
SCAFFOLD = tuple(
    (digits, steps, epsilon) for digits in (2, 1) for steps, epsilon in ((1, 0.5), (1, 2.0), (1, 10.0), (1, INF), (10, INF))
)


def _steps(steps: int, epsilon: float, *, rounds: int = 100, taken: int = CHOSEN) -> Case:
    return Case(steps=steps, batch=taken // steps, epsilon=epsilon, rounds=rounds)


def _clip(clip: float, taken: int = CHOSEN) -> Case:
    return Case(clip=clip, batch=taken // 10, epsilon=EPSILON)


def _proved(clip: float, taken: int) -> Case:
    return Case(clip=clip, batch=taken // 10, epsilon=PROVED_EPSILON, sensitivity=PROVED)


def _scaffold(method: str, digits: int, steps: int, epsilon: float) -> Case:
    exact: dict[str, Any] = {"levels": 0, "sensitivity": PROVED, "calibration": "exact"}
    return Case(steps=steps, batch=CHOSEN // steps, epsilon=epsilon, method=method, digits=digits, **exact)


def cases() -> dict[str, list[Case]]:
    """Return the points of every part."""
    fig2 = [_steps(steps, epsilon) for epsilon in (INF, EPSILON) for steps in STEPS]
    fig2 += [_steps(steps, epsilon, rounds=ITERATIONS // steps) for epsilon in (INF, EPSILON) for steps in STEPS]
    fig4a = [Case(epsilon=epsilon) for epsilon in EPSILONS]
    fig4a += [Case(epsilon=epsilon, sensitivity=PROVED) for epsilon in PROVED_EPSILONS]
    fig4a += [Case(steps=1, batch=CHOSEN, epsilon=epsilon, sensitivity=PROVED) for epsilon in EPSILONS]
    return {
        "3b": [Case(cohort=cohort, epsilon=epsilon) for epsilon in (INF, EPSILON) for cohort in COHORTS],
        "4a": fig4a,
        "4b": [_clip(clip) for clip in CLIPS],
        "4c": [case for taken in TAKEN for case in (_clip(1.0, taken), _proved(1.0, taken), Case(batch=taken // 10))],
        "4d": [one(clip, taken) for clip in CLIPS_TOGETHER for taken in TAKEN_TOGETHER for one in (_clip, _proved)],
        "scaffold": [_scaffold(method, *point) for point in SCAFFOLD for method in METHODS],
        "2": fig2,
    }


METHODS, KEYS = ("dp-fedpaq", "scaffold"), ("loss", "accuracy")


class Results(points.Results):
    """The runs of the file."""

    def of(self, case: Case, key: str = "loss", *, at: int | None = None) -> list[float]:
        """Return one number of every run of a point after so many rounds, by default all."""
        return [row[key][row["rounds"].index(at or case.rounds)] for row in self.rows(case)]

    def curve(self, case: Case) -> tuple[list[int], list[float], list[float]]:
        """Return rounds, mean loss and its standard deviation over seeds."""
        rows = self.rows(case)
        losses = list(zip(*(row["loss"] for row in rows), strict=True))
        return rows[0]["rounds"], [statistics.fmean(one) for one in losses], [deviation(one) for one in losses]

    @property
    def seconds(self) -> float:
        """Return the processor time of all runs, in seconds."""
        return sum(row["seconds"] for case in self.cases for row in self.rows(case))


def run_all(todo: Sequence[str], results: Results, seeds: int, data_dir: str) -> None:
    """Make the runs that are not in the results: all points with one seed, before the next seed."""
    for seed in range(seeds):
        for digits in (2, 1):
            every = dict.fromkeys(case for part in todo for case in cases()[part] if case.digits == digits)
            missing = [case for case in every if not results.has(case, seed)]
            if not missing:
                continue
            problem = Problem(seed, digits, data_dir)
            check(problem)
            for case in missing:
                results.add(case, run(problem, case, seed))


# Tables


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return spread(values) if all(map(math.isfinite, values)) else "diverges"


def _apart(one: Sequence[float], other: Sequence[float]) -> str:
    # If the program was interrupted, one point may lack the last seed.
    apart = [a - b for a, b in zip(one, other, strict=False)]
    error = deviation(apart) / len(apart) ** 0.5
    return f"{statistics.fmean(apart):+.3f} ± {error:.3f} ({sum(a < 0 for a in apart)} of {len(apart)})"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 or math.isinf(value) else f"{value:,.0f}"


NOISES = (("no noise", INF), ("epsilon 1", EPSILON))
ENDS = (("20 rounds", 100, 20), ("100 rounds", 100, None), ("2,000 steps", 0, None))


def tables(results: Results) -> dict[str, list[Row]]:
    """Return the rows of every table, by title; a list has the numbers of all seeds."""
    of = results.of
    return {
        "Fig. 2: E": [
            {"E": steps}
            | {
                f"{word}, {name}": of(_steps(steps, epsilon, rounds=rounds or ITERATIONS // steps), at=at)
                for name, rounds, at in ENDS
                for word, epsilon in NOISES
            }
            for steps in STEPS
        ],
        "Fig. 3b: M": [
            {"M": cohort}
            | {
                f"{word}, {at} rounds": of(Case(cohort=cohort, epsilon=epsilon), at=at)
                for at in (20, 100)
                for word, epsilon in NOISES
            }
            for cohort in COHORTS
        ],
        "Fig. 4a: epsilon": [
            {
                "E": case.steps,
                "sensitivity": case.sensitivity,
                "epsilon of a round, eq. 17": _number(case.epsilon),
                "proved for one reply": _number(case.proved(1)),
                "proved for all": _number(case.proved()),
                "loss": of(case),
                "accuracy": of(case, "accuracy"),
            }
            for case in cases()["4a"]
        ],
        "Fig. 4b: C": [{"C": clip, "loss": of(_clip(clip))} for clip in CLIPS],
        "Fig. 4c: gamma": [
            {
                "E b": taken,
                "gamma": f"{taken / RECORDS:.3f}",
                "no noise": of(Case(batch=taken // 10)),
                f"{NOT_PROVED}, epsilon 1": of(_clip(1.0, taken)),
                f"{PROVED}, epsilon 100": of(_proved(1.0, taken)),
            }
            for taken in TAKEN
        ],
        "Fig. 4d: C and gamma": [
            {"C": clip}
            | {
                f"{name}, gamma {taken / RECORDS:.3f}": of(case(clip, taken))
                for name, case in ((f"{NOT_PROVED}, epsilon 1", _clip), (f"{PROVED}, epsilon 100", _proved))
                for taken in TAKEN_TOGETHER
            }
            for clip in CLIPS_TOGETHER
        ],
        "SCAFFOLD": [_of_scaffold(results, *point) for point in SCAFFOLD],
    }


def _of_scaffold(results: Results, digits: int, steps: int, epsilon: float) -> Row:
    plain, other = ({key: results.of(_scaffold(method, digits, steps, epsilon), key) for key in KEYS} for method in METHODS)
    return {
        "digits": digits,
        "E": steps,
        "epsilon": _number(epsilon),
        "DP-FedPAQ, loss": plain["loss"],
        "SCAFFOLD, loss": other["loss"],
        "difference": _apart(other["loss"], plain["loss"]) if other["loss"] else "",
        "DP-FedPAQ, accuracy": plain["accuracy"],
        "SCAFFOLD, accuracy": other["accuracy"],
    }


# Pictures


def plot(results: Results, path: str) -> None:
    """Draw loss over rounds: for E, for M, for epsilon, and for C and gamma."""
    panels = {
        "E, no noise": {f"E = {steps}": _steps(steps, INF) for steps in STEPS},
        "E, epsilon 1": {f"E = {steps}": _steps(steps, EPSILON) for steps in STEPS},
        "M, epsilon 1": {f"M = {cohort}": Case(cohort=cohort, epsilon=EPSILON) for cohort in COHORTS},
        "epsilon": {f"epsilon {_number(epsilon)}": Case(epsilon=epsilon) for epsilon in EPSILONS},
        "C, epsilon 1": {f"C = {clip:g}": _clip(clip) for clip in CLIPS},
        "gamma, per-step, epsilon 100": {f"gamma {taken / RECORDS:.2f}": _proved(1.0, taken) for taken in TAKEN},
    }
    _draw(panels, results, path, rows=2, size=(11, 6))


def scaffold_plot(results: Results, path: str) -> None:
    """Draw loss over rounds of both methods, for two digits a client and for one."""
    panels = {
        f"HET_MNIST({digits})": {
            f"{name}, E = {steps}, epsilon {_number(epsilon)}": _scaffold(method, digits, steps, epsilon)
            for steps, epsilon in ((1, 0.5), (1, INF), (10, INF))
            for method, name in zip(METHODS, ("DP-FedPAQ", "SCAFFOLD"), strict=True)
        }
        for digits in (2, 1)
    }
    _draw(panels, results, path, size=(8, 3.5), pairs=True)


def _draw(
    panels: dict[str, dict[str, Case]],
    results: Results,
    path: str,
    *,
    rows: int = 1,
    size: tuple[float, float],
    pairs: bool = False,
) -> None:
    from flower_dp.reporting import canvas  # noqa: PLC0415 - matplotlib takes a second

    figure = canvas.empty(*size)
    axes = figure.subplots(rows, len(panels) // rows)
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=True):
        for place, (label, case) in enumerate(curves.items()):
            rounds, means, deviations = results.curve(case)
            look = canvas.look(place // 2, place % 2) if pairs else canvas.look(place)
            axis.errorbar(rounds, means, yerr=deviations, label=label, linewidth=1, elinewidth=0.5, **look)
        axis.set(title=title, xlabel="round", ylabel="test loss", ylim=(0, 3.5))
        axis.legend(fontsize=7)
    canvas.save(figure, path)


def main() -> None:
    """Make the runs, print the tables, draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--data-dir", required=True, help="folder of the full MNIST")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=list(cases()), default=list(cases()))
    parser.add_argument("--plot", help="picture of the figures' curves")
    parser.add_argument("--scaffold-plot", help="picture of the part `scaffold`")
    parser.add_argument("--no-runs", action="store_true", help="make only tables and pictures of the results so far")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    results = Results(options.results, Case)
    if not options.no_runs:
        run_all(options.parts, results, options.seeds, options.data_dir)
    for title, rows in tables(results).items():
        shown = [{key: _spread(value) if isinstance(value, list) else value for key, value in row.items()} for row in rows]
        print(f"\n{title}\n\n{table(shown)}")
    print(f"\nprocessor time of the runs: {results.seconds:.0f} s")
    if options.plot:
        plot(results, options.plot)
    if options.scaffold_plot:
        scaffold_plot(results, options.scaffold_plot)


if __name__ == "__main__":
    main()
