"""A problem of each planner, as a mapping: the examples of docs/planning.md, and variants of them."""

import re
import tomllib
from pathlib import Path

from flower_dp.planning import nbafl
from flower_dp.planning.planner import keys_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
LAPLACE, BOUND, PASGD, FEDPAQ, FTRL = (tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
GAUSSIAN = LAPLACE | {"mechanism": "gaussian", "clip_norm": 10.0, "epsilon": 0.5, "delta": 1e-5, "max_rounds": 100}
GAUSSIAN |= {"sampling_rate": 0.01, "gradient_variance": 4.0, "noise_constant": 1.5}
NOISE = {key: BOUND[key] for key in keys_of(nbafl.Problem)}
