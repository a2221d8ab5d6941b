"""An audit from outside: what can be proved of epsilon from what methods really release. No other part of the library uses it."""

from flower_dp.audit.audit import Audit, Claim, audit
from flower_dp.audit.case import Case
from flower_dp.audit.methods import CASES

__all__ = ["CASES", "Audit", "Case", "Claim", "audit"]
