"""An audit from outside: lower bounds on epsilon, proved from the releases of real runs.

No other part of the library uses this package.
"""

from flower_dp.audit.audit import Audit, Claim, audit
from flower_dp.audit.case import Case
from flower_dp.audit.methods import CASES

__all__ = ["CASES", "Audit", "Case", "Claim", "audit"]
