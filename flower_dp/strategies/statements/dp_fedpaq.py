"""The privacy statement of DP-FedPAQ and SCAFFOLD: the noise of an update, and the paper's epsilon, added up over replies."""

from typing import TYPE_CHECKING

from flower_dp.privacy.dp_fedpaq import paper_epsilon, paper_noise_ratio, violated_conditions
from flower_dp.privacy.statement import PaperEpsilon, PrivacyStatement
from flower_dp.strategies.run_state import RunFacts
from flower_dp.strategies.statements.local import counts_sampling, least_and_largest, local_statement, most_replies

if TYPE_CHECKING:
    from flower_dp.strategies.dp_fedpaq import DPFedPAQRules


def statement_of(rules: "DPFedPAQRules", run: RunFacts) -> PrivacyStatement:
    """Return the statement: the worst client, and the distribution over clients."""
    books, steps = rules.books, rules.steps
    sizes = books.num_records.values()
    whole = bool(sizes) and all(size == steps.num_records for size in sizes)
    each = f"all records, {steps.num_records}" if whole else f"{steps.num_records} records at random, without replacement"
    secret = ("only the client knows which of its records it takes",) if counts_sampling(books) else ()
    return local_statement(
        rules.title,
        books,
        run,
        message_std=_message_std(rules),
        noise=_noise_numbers(rules),
        paper=_paper(rules, run),
        sampling=f"{rules.training.sampling}: {most_replies(books)}; {each} in each",
        assumptions=(steps.proof, *secret, *rules.assumptions),
        incidents=rules.incidents,
    )


def _message_std(rules: "DPFedPAQRules") -> float:
    """The least std of the noise on a number that a client sends: on its update, before that is quantised."""
    stds = [terms.release.noise_std for terms in rules.books.terms.values()]
    # Steps shrink from round to round, and the noise on an update with them.
    return -rules.steps.update_factor(max(1, rules.books.num_rounds)) * min(stds, default=0.0)


def _noise_numbers(rules: "DPFedPAQRules") -> dict[str, float]:
    steps = rules.steps
    numbers = {"clip_norm": steps.clip_norm}
    if steps.update_clip_norm is not None:
        numbers["update_clip_norm"] = steps.update_clip_norm
    numbers["update_sensitivity_of_round_1"] = steps.update_sensitivity(1)
    std = "noise_std_of_an_update_of_round_1"
    numbers |= least_and_largest(rules.books, std, lambda release: -steps.update_factor(1) * release.noise_scale)
    if rules.quantization_levels is not None:
        numbers["quantization_levels"] = rules.quantization_levels
    return numbers


def _paper(rules: "DPFedPAQRules", run: RunFacts) -> PaperEpsilon | None:
    """The paper's epsilon of one round, added up over the replies of the client whom it costs most."""
    worst: tuple[float, float, float, int] | None = None
    for name, ledger in rules.books.ledgers.items():
        release, replies = rules.books.terms[name].release, ledger.num_charges
        part = rules.steps.num_records / rules.books.num_records[name]
        if not replies:
            continue
        if not release.noise_scale or 1.25 * part <= rules.delta / replies:
            return None
        each = paper_epsilon(
            noise_std=release.noise_scale, sensitivity=release.sensitivity, sampled_part=part, delta=rules.delta / replies
        )
        worst = max(worst or (0.0, 0.0, 0.0, 0), (replies * each, each, part, replies))
    if worst is None:
        return None
    total, each, part, replies = worst
    faults = violated_conditions(each, part)
    if run.seeded_noise:
        faults.append("noise came from a fixed seed")
    note = (
        f"epsilon and delta of a round ({each:.4g}, {rules.delta / replies:.3g}), added up over {replies} replies: the paper "
        "composes nothing"
    )
    if rules.calibration == "paper":
        # At the delta of the settings, not at a part of it.
        ratio = paper_noise_ratio(epsilon=each, sampled_part=part, delta=rules.delta / replies)
        asked = paper_epsilon(noise_std=ratio, sensitivity=1.0, sampled_part=part, delta=rules.delta)
        note += (
            f"; calibration='paper': the noise was made by this formula for epsilon {asked:.4g}, delta {rules.delta:.3g} of each "
            "reply, which is no budget of all replies"
        )
    return PaperEpsilon(
        epsilon=total,
        formula="2 gamma Delta sqrt(2 ln(1.25 gamma / delta)) / sigma a round, DP-FedPAQ eq. 17",
        valid=not faults,
        reason="; ".join([*faults, note]),
    )
