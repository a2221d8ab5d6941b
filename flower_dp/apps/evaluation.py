"""Private evaluation on the clients, as a table of settings."""

from dataclasses import dataclass, fields

from flower_dp.core import checks

# What the app's clients compute of the global model and their own records.
METRICS = ("loss", "accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The table `evaluation`."""

    every: int = 0
    metrics: str = "accuracy=1"
    noise_multiplier: float = 4.0
    sampling_rate: float = 0.0
    epsilon: float = 0.0

    def check(self, findings: checks.Findings) -> None:
        """Find values that make no sense."""
        before = len(findings.lines)
        with findings.noted():
            checks.integer("evaluation.every", self.every, at_least=0)
        with findings.noted():
            checks.number("evaluation.noise-multiplier", self.noise_multiplier, at_least=0)
        with findings.noted():
            checks.number("evaluation.sampling-rate", self.sampling_rate, at_least=0, at_most=1)
        with findings.noted():
            checks.number("evaluation.epsilon", self.epsilon, at_least=0)
        with findings.noted():
            self.bounds()
        if not self.every and len(findings.lines) == before:
            for one in fields(self):
                with findings.noted():
                    self.refuse(one.name, "is read with evaluation.every above 0 only")

    def refuse(self, name: str, why: str) -> None:
        """Refuse a setting that somebody has set and nobody reads.

        Raises:
            ValueError: if it has another value than its default.
        """
        value = getattr(self, name)
        if value != type(self).__dataclass_fields__[name].default:
            raise ValueError(f"evaluation.{name.replace('_', '-')}={value!r}: {why}")

    def bounds(self) -> dict[str, float]:
        """Return the public upper bound of every metric by name.

        Raises:
            ValueError: if the text is no list of metrics of the app's clients, each with a bound.
        """
        found: dict[str, float] = {}
        for part in self.metrics.split(","):
            name, sign, bound = (word.strip() for word in part.partition("="))
            if name not in METRICS or not sign or name in found:
                raise ValueError(
                    f"evaluation.metrics={self.metrics!r}: must be metrics with their upper bounds, each once, with commas "
                    f"between them, as 'loss=5,accuracy=1'; there are {', '.join(METRICS)}"
                )
            try:
                value = float(bound)
            except ValueError:
                raise ValueError(f"evaluation.metrics={self.metrics!r}: {bound!r} is no number") from None
            found[name] = checks.number(f"evaluation.metrics: the bound of {name}", value, above=0)
        return found
