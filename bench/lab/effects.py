"""Effects of the lab's three choices on speed: a 2^3 factorial, by contrasts of log time.

In each round of interleaved runs every corner has a time; a contrast of the eight log times is one
observation of an effect, free of what all corners share in that round (the clock, the heat). The
interval of an effect is Student's, over the rounds.

Effects are ratios of speed. A main effect is the gain of v2's choice over v1's: the geometric mean
over the settings of the other two choices. A two-way interaction is the gain of both choices over
the product of their single gains, that is one choice's gain with the other made over its gain
without; 1 means that the gains are independent. The three-way one is the same for a joint gain.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

# v1's choice first.
CHOICES = {
    "loop order": ("kv_outer", "q_outer"),
    "warp partition": ("split_k", "split_q"),
    "normalisation": ("eager", "deferred"),
}
CORNERS = tuple("/".join(corner) for corner in itertools.product(*CHOICES.values()))
V1, V2 = CORNERS[0], CORNERS[-1]
CONJECTURE = "loop order x warp partition"


@dataclass(frozen=True)
class Effect:
    """A ratio of speed with its 95 % confidence interval; `order` counts the choices in it."""

    name: str
    order: int
    ratio: float
    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        return self.low > 1 or self.high < 1


def student_probability(t: float, freedom: int) -> float:
    """P(|T| < t) of Student's t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    series = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        series += term
    inside = math.sin(angle) * series
    return 2 / math.pi * (angle + inside) if odd else inside


def student_quantile(freedom: int, probability: float = 0.95) -> float:
    """The t within which |T| lies with `probability`; infinite without a degree of freedom."""
    if freedom < 1:
        return math.inf
    low, high = 0.0, 1.0
    while student_probability(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if student_probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def contrast_terms() -> dict[str, tuple[int, list[int]]]:
    """Name -> (order, sign of each of CORNERS): +1 where an even number of its choices is v1's."""
    terms = {}
    for order in range(1, len(CHOICES) + 1):
        for members in itertools.combinations(range(len(CHOICES)), order):
            name = " x ".join(list(CHOICES)[member] for member in members)
            signs = []
            for corner in itertools.product((-1, 1), repeat=len(CHOICES)):
                signs.append(math.prod(corner[member] for member in members))
            terms[name] = (order, signs)
    return terms


def contrasts(times: dict[str, Sequence[float]]) -> dict[str, list[float]]:
    """Log of each effect in each round.

    Args:
        times: for each of CORNERS its time in every round, any unit.

    Raises:
        ValueError: a corner is missing, or corners differ in their number of rounds.
    """
    missing = [corner for corner in CORNERS if not times.get(corner)]
    if missing:
        raise ValueError(f"no times of {', '.join(missing)}")
    speeds = [[-math.log(time) for time in times[corner]] for corner in CORNERS]
    observed = {}
    for name, (order, signs) in contrast_terms().items():
        settings_of_the_others = len(CORNERS) / 2**order
        observed[name] = [
            sum(sign * speed for sign, speed in zip(signs, column, strict=True))
            / settings_of_the_others
            for column in zip(*speeds, strict=True)
        ]
    return observed


def effect(name: str, observed: Sequence[float]) -> Effect:
    """The effect whose log was observed once a round; with one round the interval has no end."""
    rounds = len(observed)
    mean = statistics.fmean(observed)
    half = math.inf
    if rounds > 1:
        half = student_quantile(rounds - 1) * statistics.stdev(observed) / math.sqrt(rounds)
    ends = (math.exp(mean - half), math.exp(mean + half) if half < math.inf else math.inf)
    return Effect(name, contrast_terms()[name][0], math.exp(mean), *ends)


def effects_of_cells(cells: Sequence[dict[str, Sequence[float]]]) -> list[list[dict]]:
    """The seven effects of each cell, and last those of all cells: their geometric mean.

    Args:
        cells: as `contrasts` takes them; all cells with the same number of rounds.
    """
    by_cell = [contrasts(times) for times in cells]
    pooled = {
        name: [statistics.fmean(column) for column in zip(*(c[name] for c in by_cell), strict=True)]
        for name in (by_cell[0] if by_cell else ())
    }
    return [
        [asdict(effect(name, observed)) for name, observed in one.items()]
        for one in (*by_cell, pooled)
        if one
    ]


def verdict(interactions: Sequence[Effect], cells: Sequence[str]) -> str:
    """What the measurements say of the conjecture, in words; one interaction for each cell name."""
    lines = []
    for joint, cell in zip(interactions, cells, strict=True):
        says = "excludes 1" if joint.excludes_one else "includes 1"
        lines.append(
            f"- {cell}: both together gain {joint.ratio:.3f} times the product of their single "
            f"gains ({joint.low:.3f} to {joint.high:.3f}): the interval {says}"
        )
    excluded = sum(joint.excludes_one for joint in interactions)
    if excluded == 0:
        conclusion = "In no cell can a joint gain be told from none: the conjecture stands."
    else:
        whole = "every cell" if excluded == len(cells) else f"{excluded} of {len(cells)} cells"
        ratios = [joint.ratio for joint in interactions]
        conclusion = (
            f"In {whole} the interval excludes 1: there the gains are not independent. "
            f"The joint gain is {min(ratios):.3f} to {max(ratios):.3f} times the product."
        )
    return (
        "Conjecture: loop order and warp partition are independent gains.\n\n"
        + "\n".join(lines)
        + f"\n\n{conclusion}"
    )
